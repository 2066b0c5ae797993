//! The output of programs that fail, as users see it: the page of the book, and the same programs in other places.

use super::*;

const MARK: &str = "<!-- explain ";

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/troubleshooting/examples.md")
}

/// Runs `explain.c` with these words: what its user sees. `wanted` is what the user should see.
fn explain(words: &[&str], wanted: &str) -> String {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let program = libraries().join(format!("explain.{}", std::process::id()));
        compile("explain", &program, &[]);
        program
    });
    let lines = |of: &str| wanted.lines().filter(|line| line.starts_with(of)).count();
    let lines = format!("{} {}", lines("ERROR "), lines("peer: ERROR "));
    let mut command = Command::new("timeout");
    if words[0] == "partition" {
        partitions(&mut command, words[1] == "two");
    }
    let output = command
        .args(["120", "unshare", "-n"])
        .arg(program)
        .args(words)
        .env("LD_LIBRARY_PATH", libraries())
        .env("ANYVERBS_REGISTRY", format!("anyverbs-explain-{}", std::process::id()))
        .env("ANYVERBS_UDP_PORT", "4791")
        .env("EXPLAIN_LINES", lines)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {}\n{said}{errors}", output.status);
    masked(&said)
}

/// Programs with one mistake each, on one host and on two. All that their users see stands in the book.
#[test]
fn failures_explain_themselves() {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let mut wanted = fs::read_to_string(page()).unwrap();
    let (mut seen, mut block) = (String::new(), false);
    let mut count = 0;
    let mut lines = wanted.lines();
    while let Some(line) = lines.next() {
        if block && line != "```" {
            continue;
        }
        block = false;
        seen += &format!("{line}\n");
        let Some(words) = line.strip_prefix(MARK).and_then(|rest| rest.strip_suffix(" -->")) else {
            continue;
        };
        let words: Vec<_> = words.split(' ').collect();
        let shown: Vec<_> = lines.clone().skip(1).take_while(|line| *line != "```").collect();
        seen += &format!("```text\n{}", explain(&words, &shown.join("\n")));
        (block, count) = (true, count + 1);
    }
    assert!(count > 20, "{count}");
    if env::var_os("UPDATE_EXAMPLES").is_some() {
        fs::write(page(), &seen).unwrap();
        wanted.clone_from(&seen);
    }
    assert_eq!(
        seen, wanted,
        "write it anew: UPDATE_EXAMPLES=1 cargo test -p anyverbs-capi failures_explain"
    );
}

/// Failures that need a second host.
const ON_TWO_HOSTS: [&str; 3] = ["nobody-on-port", "no-route", "no-arp"];

/// The page shows one of two hosts or one, and one end that fails. Elsewhere the user sees the same, but for the addresses.
#[test]
fn failures_explain_themselves_in_other_places_and_at_the_other_end() {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let text = fs::read_to_string(page()).unwrap();
    let mut shown = Vec::new();
    for (at, _) in text.match_indices(MARK) {
        let (words, rest) = text[at + MARK.len()..].split_once(" -->\n```text\n").unwrap();
        let (name, place) = words.split_once(' ').unwrap();
        shown.push((name, place, anonymous(rest.split_once("```").unwrap().0)));
    }
    shown.retain(|(name, ..)| !name.starts_with("call-"));
    let mut differ = Vec::new();
    for (name, place, wanted) in &shown {
        let is_shown = |place| shown.iter().any(|(n, p, _)| n == name && *p == place);
        let mut places = vec![*place];
        if !ON_TWO_HOSTS.contains(name) && *place != "link" {
            places.extend(["one", "two"].into_iter().filter(|place| !is_shown(*place)));
        }
        for elsewhere in places {
            let mut runs = vec![vec![*name, elsewhere, "swapped"]];
            if elsewhere != *place {
                runs.push(vec![*name, elsewhere]);
            }
            for words in runs {
                let seen = anonymous(&explain(&words, wanted));
                if seen != *wanted {
                    differ.push(format!("{words:?}\n{seen}instead of\n{wanted}"));
                }
            }
        }
    }
    assert!(shown.len() > 25, "{}", shown.len());
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

/// The same text without addresses of hosts.
fn anonymous(text: &str) -> String {
    let is_address = |word: &str| {
        let word = word.trim_matches([':', ';', ',']);
        word.parse::<std::net::IpAddr>().is_ok() || word.parse::<std::net::SocketAddr>().is_ok()
    };
    let line = |line: &str| {
        let words = line.split(' ').map(|word| if is_address(word) { "ADDRESS" } else { word });
        words.collect::<Vec<_>>().join(" ") + "\n"
    };
    text.lines().map(line).collect()
}

/// Puts `N` for the numbers that differ from run to run: those of queue pairs and threads, keys, addresses, times.
fn masked(output: &str) -> String {
    let mut masked = String::new();
    for line in output.lines() {
        let mut before = "";
        let words: Vec<_> = line.split(' ').collect();
        for (n, word) in words.iter().enumerate() {
            let digits: &[_] = &['(', ')', ',', ':', ';'];
            let number = word.trim_matches(digits);
            let varies = match number.strip_prefix("0x") {
                Some(hex) => {
                    let is_key =
                        matches!(before, "(key" | "key") || words[..n].ends_with(&["region", "is"]);
                    hex.len() > 4 || is_key
                }
                None => {
                    let unit = words.get(n + 1).map_or("", |next| next.trim_matches(digits));
                    number.parse::<u64>().is_ok() && (unit == "ms" || before == "thread")
                        || matches!(before, "(thread" | "(pid")
                }
            };
            let is_pd = word.starts_with("pd=");
            let word = if is_pd {
                "pd=N".to_owned()
            } else if varies {
                word.replace(number, "N")
            } else {
                (*word).to_owned()
            };
            masked += if n == 0 { "" } else { " " };
            masked += &word;
            before = words[n];
        }
        masked.push('\n');
    }
    masked
}
