use std::io::Write;
use std::path::PathBuf;

use serde_json::json;

use super::*;

/// Files of a test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("anyverbs-report-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn begin(id: u64, at: f64) -> String {
    let args = json!({ "operation": "SEND", "wr_id": id, "bytes": 64 });
    let span = json!({ "local": id });
    json!({ "ph": "b", "cat": "work", "name": "x", "pid": 5, "tid": 17, "ts": at, "id2": span, "args": args }).to_string()
}

fn end(id: u64, at: f64, status: &str) -> String {
    let (span, args) = (json!({ "local": id }), json!({ "status": status }));
    json!({ "ph": "e", "cat": "work", "name": "x", "pid": 5, "tid": 17, "ts": at, "id2": span, "args": args }).to_string()
}

fn packet((pid, tid): (u64, u32), direction: &str, dest: u32, psn: u32, at: f64) -> String {
    let args = json!({ "direction": direction, "dest": dest, "psn": psn, "bytes": 64 });
    json!({ "ph": "i", "cat": "packet", "name": "RC_SEND_ONLY", "pid": pid, "tid": tid, "ts": at, "args": args }).to_string()
}

fn error(at: f64, cause: u16) -> String {
    let args = json!({ "wr_id": 2, "vendor_err": cause });
    json!({ "ph": "i", "cat": "error", "name": "IBV_WC_RETRY_EXC_ERR", "pid": 5, "tid": 17, "ts": at, "args": args }).to_string()
}

fn retry(at: f64) -> String {
    json!({ "ph": "i", "cat": "retry", "name": "local_ack_timeout_err", "pid": 5, "tid": 17, "ts": at, "args": { "n": 1 } }).to_string()
}

fn name(what: &str, pid: u64, tid: u32, name: &str) -> String {
    json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": { "name": name } }).to_string()
}

fn trace(lines: &[String]) -> String {
    lines.iter().fold("[\n".to_owned(), |text, line| text + line + ",\n")
}

fn report(files: &[PathBuf]) -> String {
    page(&Story::read(files).unwrap())
}

/// A conversation of two processes: the second packet is lost and sent again.
fn conversation() -> String {
    trace(&[
        name("process_name", 5, 0, "client[5]"),
        name("thread_name", 5, 17, "QP 17 <RC>"),
        name("process_name", 6, 0, "server[6]"),
        name("thread_name", 6, 18, "QP 18"),
        begin(1, 10.0),
        packet((5, 17), "out", 18, 100, 11.0),
        packet((6, 18), "in", 18, 100, 13.0),
        packet((6, 18), "out", 17, 100, 14.0),
        packet((5, 17), "in", 17, 100, 15.0),
        end(1, 16.0, "IBV_WC_SUCCESS"),
        begin(2, 20.0),
        packet((5, 17), "out", 18, 101, 21.0),
        retry(4000.0),
        packet((5, 17), "out", 18, 101, 4001.0),
        packet((6, 18), "in", 18, 101, 4002.0),
        error(4099.0, 1208),
        end(2, 4100.0, "IBV_WC_RETRY_EXC_ERR"),
    ])
}

/// Tags that are not closed, by a check that is enough for what this page has.
fn assert_whole(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let body = &page[page.find("<body").unwrap()..];
    for tag in body.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            if name != "html" {
                assert_eq!(open.pop(), Some(name), "</{name}>");
            }
        } else if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    for word in ["http://", "https://", "<script", "src=", "@import"] {
        assert!(!page.contains(word), "the page needs nothing else: {word}");
    }
}

#[test]
fn a_page_shows_what_was_lost_and_what_failed() {
    let scratch = Scratch::new("lost");
    let page = report(&[scratch.file("a", &conversation())]);
    assert_whole(&page);
    for words in [
        "QP 17 &lt;RC&gt;",
        "client[5]",
        "server[6]",
        "psn 0x65, 64 B (lost)",
        "local_ack_timeout_err",
        "post SEND wr_id 0x2",
        "done SEND wr_id 0x2: IBV_WC_RETRY_EXC_ERR",
        "IBV_WC_RETRY_EXC_ERR, AV1208: ",
        // The failed request has none.
        "<td class=\"n\">64 B</td>",
        "6.00 us",
        "Throughput over time",
    ] {
        assert!(page.contains(words), "{words}");
    }
    assert_eq!(page.matches("(lost)").count(), 1, "all others came, also the repetition");
}

#[test]
fn traces_of_several_files_are_one_story() {
    let scratch = Scratch::new("several");
    let lines: Vec<_> = conversation().lines().skip(1).map(str::to_owned).collect();
    let of = |pid: &str| {
        lines
            .iter()
            .filter(|line| line.contains(pid))
            .map(|line| line.trim_end_matches(',').to_owned())
            .collect::<Vec<_>>()
    };
    let files = [
        scratch.file("server", &trace(&of("\"pid\":6"))),
        scratch.file("client", &trace(&of("\"pid\":5"))),
    ];
    assert_eq!(report(&files), report(&[scratch.file("both", &conversation())]));
}

/// A trace may lack the names of queue pairs, and has the number alone of a peer that is not traced.
#[test]
fn queue_pairs_have_the_names_of_the_log() {
    let scratch = Scratch::new("names");
    let lines = [packet((5, 0x01_0011), "out", 0x02_0012, 100, 11.0)];
    let page = report(&[scratch.file("a", &trace(&lines))]);
    assert_whole(&page);
    for name in [">QP 0x010011<", ">QP 0x020012<"] {
        assert!(page.contains(name), "{name}: {page}");
    }
    assert!(!page.contains("QP 65553") && !page.contains("QP 131090"), "{page}");
}

#[test]
fn findings_are_shown_with_their_stacks() {
    let scratch = Scratch::new("findings");
    let finding = json!({
        "check": "leak", "process": 7, "message": "a <QP> was not destroyed", "why": "w", "remedy": "r",
        "stacks": [{ "title": "made here", "frames": [
            { "function": "main", "file": "a.c", "line": 3 },
            { "function": "??", "file": null, "line": null, "object": "/usr/bin/a", "offset": 52 },
        ] }],
    });
    let page = report(&[scratch.file("findings", &format!("{finding}\n"))]);
    assert_whole(&page);
    for words in [
        "<b>leak</b>: a &lt;QP&gt; was not destroyed",
        "main a.c:3",
        "?? (/usr/bin/a+0x34)",
        "1 finding of 1 kind",
    ] {
        assert!(page.contains(words), "{words}: {page}");
    }
}

#[test]
fn a_sarif_document_is_refused_as_such() {
    let scratch = Scratch::new("sarif");
    for name in ["found.sarif", "found.json"] {
        let file = scratch.file(name, "{\n  \"version\": \"2.1.0\"\n}\n");
        let error = format!("{:#}", Story::read(&[file]).unwrap_err());
        assert!(error.contains("SARIF") && !error.contains("line 1"), "{error}");
    }
}

#[test]
fn a_file_that_is_broken_is_refused_with_the_place() {
    let scratch = Scratch::new("broken");
    let said = |name: &str, content: &str| {
        format!("{:#}", Story::read(&[scratch.file(name, content)]).unwrap_err())
    };
    assert!(said("empty", "").starts_with("no findings in "));
    assert!(said("nothing", "[\n").contains("no event"));
    let broken = trace(&[begin(1, 1.0), "{\"ph\":".into(), end(1, 2.0, "IBV_WC_SUCCESS")]);
    assert!(said("broken", &broken).contains("line 3: no event, and no finding: EOF"));
    assert!(said("text", "this is text\nand more\n").contains("line 1: no event"));
    assert!(said("pcapng", "\n\r\r\n\0\u{1}\n").contains("line"));
    let missing = Story::read(&[scratch.0.join("missing")]).unwrap_err();
    assert!(format!("{missing:#}").contains("missing: No such file"));
    let directory = Story::read(&[&scratch.0]).unwrap_err();
    assert!(format!("{directory:#}").contains("Is a directory"));
}

#[test]
fn what_a_good_run_has_as_well_is_no_trouble() {
    let scratch = Scratch::new("good");
    let receive = json!({ "operation": "RECV", "wr_id": 9, "bytes": 64 });
    let receive = json!({ "ph": "b", "cat": "work", "name": "x", "pid": 5, "tid": 17, "ts": 0.0, "id2": { "local": 9 }, "args": receive });
    let other = |kind: &str, name: &str, at: f64| {
        json!({ "ph": "i", "cat": kind, "name": name, "pid": 5, "tid": 17, "ts": at, "args": {} })
            .to_string()
    };
    let events = |event: &str| {
        trace(&[
            receive.to_string(),
            begin(1, 1e6),
            packet((5, 17), "out", 18, 100, 1e6 + 1.0),
            other("event", event, 1e6 + 2.0),
            end(1, 1e6 + 9.0, "IBV_WC_SUCCESS"),
            other("drop", "drop_stale_ack", 5e6),
        ])
    };
    let page = report(&[scratch.file("good", &events("CommEst"))]);
    assert_whole(&page);
    assert!(!page.contains("class=\"bad\"") && !page.contains("class=\"trouble\""), "{page}");
    let summary =
        "6 events of 1 queue pair in 4.00 s, after 1.00 s in which receives alone were posted.";
    assert!(page.contains(summary), "{page}");
    // Neither a receive that waits for the first message nor the last ACK stretches the chart.
    let chart = &page[page.find("Throughput over time</title>").unwrap()..];
    let chart = &chart[..chart.find("</svg>").unwrap()];
    assert!(chart.contains(">0 ns<") && chart.contains(">9.00 us<"), "{chart}");
    let page = report(&[scratch.file("bad", &events("Fatal"))]);
    assert!(page.contains("class=\"bad\"") && page.contains("class=\"trouble\""), "{page}");
}

#[test]
fn a_run_without_findings_has_a_report() {
    let scratch = Scratch::new("none");
    let files = [scratch.file("trace", &conversation()), scratch.file("findings", "")];
    let story = Story::read(&files).unwrap();
    assert_eq!((story.events.len(), story.empty.len()), (13, 1));
}

#[test]
fn a_trace_of_a_killed_program_is_read_up_to_the_end() {
    let scratch = Scratch::new("killed");
    let whole = trace(&[begin(1, 1.0), end(1, 2.0, "IBV_WC_SUCCESS"), begin(2, 3.0)]);
    let last = whole.rfind("\"ts\"").unwrap();
    let file = scratch.file("cut", &whole[..last]);
    let story = Story::read(&[&file]).unwrap();
    assert_eq!((story.events.len(), story.cut.len()), (2, 1));
    let page = page(&story);
    assert_whole(&page);
    assert!(page.contains("The last line of"));
}

#[test]
fn many_events_make_a_short_page() {
    let scratch = Scratch::new("many");
    let path = scratch.0.join("many");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    writeln!(file, "[").unwrap();
    for i in 0..5_000 {
        let at = i as f64 * 3.0;
        for line in [
            begin(i, at),
            packet((5, 17), "out", 18, i as u32, at + 0.5),
            packet((6, 18), "in", 18, i as u32, at + 1.0),
            end(i, at + 1.5 + (i % 100) as f64, "IBV_WC_SUCCESS"),
        ] {
            writeln!(file, "{line},").unwrap();
        }
    }
    writeln!(file, "{},", retry(9_000.0)).unwrap();
    file.flush().unwrap();
    let page = report(&[path]);
    assert_whole(&page);
    assert!(page.len() < 200_000, "{} bytes", page.len());
    let rule = format!("{} of 15001 events", diagram::FIRST + diagram::AROUND);
    assert!(page.contains(&rule));
}
