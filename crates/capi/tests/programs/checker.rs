//! Programs under `anyverbs run --check`.

use super::*;

/// Runs `mistakes.c` under the checker: its exit status, what it said, and the checks that its report names.
fn check(words: [&str; 3], mode: &str, suppressions: &str) -> (Option<i32>, String, Vec<String>) {
    check_with(words, mode, suppressions, &[])
}

/// As [`check`], with a configuration.
fn check_with(
    words: [&str; 3],
    mode: &str,
    suppressions: &str,
    configuration: &[(&str, &str)],
) -> (Option<i32>, String, Vec<String>) {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let program = libraries().join(format!("mistakes.{}", std::process::id()));
        compile("mistakes", &program, &[]);
        program
    });
    check_program(program, &words, (mode, suppressions), configuration)
}

pub(super) fn check_program(
    program: &Path,
    words: &[&str],
    (mode, suppressions): (&str, &str),
    configuration: &[(&str, &str)],
) -> (Option<i32>, String, Vec<String>) {
    let port = UdpPort::reserve();
    let number = port.number();
    let file = |kind: &str| env::temp_dir().join(format!("anyverbs-check-{number}.{kind}"));
    let (report, rules) = (file("json"), file("rules"));
    fs::write(&rules, suppressions).unwrap();
    let is_small = words[0].starts_with("beyond-limits");
    let persona = if is_small { "small_limits.toml" } else { "without_srq.toml" };
    let beside = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name);
    let mut command = Command::new("timeout");
    if words[0].contains("persona") {
        command.env("ANYVERBS_PERSONA", beside(persona));
    }
    if words[0].contains("pkey") {
        command.env("ANYVERBS_CONFIG", beside("partitions.toml"));
    }
    let output = command
        .arg("60")
        .arg(program)
        .args(words)
        .env("LD_LIBRARY_PATH", libraries())
        .env("ANYVERBS_REGISTRY", format!("anyverbs-check-{number}"))
        .env("ANYVERBS_UDP_PORT", number.to_string())
        .env("ANYVERBS_CHECK", mode)
        .env("ANYVERBS_CHECK_REPORT", &report)
        .env("ANYVERBS_CHECK_SUPPRESSIONS", &rules)
        .envs(configuration.iter().copied())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let lines = fs::read_to_string(&report).unwrap_or_default();
    let name = |line: &str| {
        let (_, rest) = line.split_once(r#""check":""#).unwrap();
        rest.split('"').next().unwrap().to_owned()
    };
    let found = lines.lines().map(name).collect();
    let _ = (fs::remove_file(report), fs::remove_file(rules));
    (output.status.code(), said, found)
}

/// Ways of packets between queue pairs of one process: within it, and by UDP.
const WAYS: [&[(&str, &str)]; 2] = [&[], &[("ANYVERBS_INPROC", "0")]];

#[test]
fn the_checker_finds_each_mistake_and_nothing_else() {
    finds_each_mistake(WAYS[0]);
}

#[test]
fn the_checker_finds_each_mistake_where_packets_travel() {
    finds_each_mistake(WAYS[1]);
}

fn finds_each_mistake(way: &[(&str, &str)]) {
    for id in checks() {
        // No call reads what `ibv_poll_cq` has written.
        let is_seen = |calls: &&str| id != "failed-wc-opcode" || *calls == "extended";
        for calls in ["plain", "extended"].into_iter().filter(is_seen) {
            let (status, said, found) = check_with([&id, "wrong", calls], "1", "", way);
            assert_eq!((status, &found[..]), (Some(66), &[id.clone()][..]), "{id} {calls}: {said}");
            // The function of the mistake, with its file and line, stands in a stack.
            let function = id.replace('-', "_");
            let is_named = |line: &str| line.contains(&function) && line.contains("c/mistakes");
            assert!(said.lines().any(is_named), "{id} {calls}: {said}");
            let (status, said, found) = check_with([&id, "right", calls], "1", "", way);
            assert_eq!((status, found), (Some(0), Vec::new()), "{id} {calls}: {said}");
        }
    }
}

#[test]
fn the_checker_names_the_group_of_a_queue_pair_in_use() {
    let run = |kind| check(["destroyed-in-a-group", kind, "plain"], "1", "");
    let (status, said, found) = run("wrong");
    assert_eq!((status, &found[..]), (Some(66), &["ended-in-use".to_owned()][..]), "{said}");
    let what = "is attached to the multicast group ff0e::ffff:ef01:203; the call returns EBUSY";
    assert!(said.contains(what) && said.contains("It was attached here"), "{said}");
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

#[test]
fn the_checker_names_the_group_that_an_identifier_has_joined() {
    let run = |kind| check(["destroyed-in-a-joined-group", kind, "plain"], "1", "");
    let (status, said, found) = run("wrong");
    assert_eq!((status, &found[..]), (Some(66), &["ended-in-use".to_owned()][..]), "{said}");
    let what = "is attached to the multicast group ::ffff:239.1.2.3; the call returns EBUSY";
    assert!(said.contains(what) && said.contains("The group was joined here"), "{said}");
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

#[test]
fn the_checker_reports_a_child_that_ends_what_its_parent_made() {
    let run = |kind| check(["ended-by-a-forked-child", kind, "plain"], "1", "");
    let (status, said, found) = run("wrong");
    let wanted = vec!["posted-from-forked-child".to_owned()];
    assert_eq!((status, found), (Some(66), wanted), "{said}");
    assert!(said.contains("a forked child ends the queue pair at"), "{said}");
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

/// A program with a mistake has these findings, in any order, and the look-alike has none.
fn finds(id: &str, wanted: &[&str]) -> String {
    let [within, _] = WAYS.map(|way| {
        let (status, wrong, mut found) = check_with([id, "wrong", "plain"], "1", "", way);
        found.sort();
        let names: Vec<_> = found.iter().map(String::as_str).collect();
        assert_eq!((status, &names[..]), (Some(66), wanted), "{id} {way:?}: {wrong}");
        let (status, said, found) = check_with([id, "right", "plain"], "1", "", way);
        assert_eq!((status, found), (Some(0), Vec::new()), "{id} {way:?}: {said}");
        wrong
    });
    within
}

#[test]
fn the_checker_knows_completions_that_were_not_polled() {
    let wanted = ["mr-deregistered-with-work", "qp-destroyed-with-work"];
    finds("ended-before-a-poll", &wanted);
    finds("received-before-a-poll", &wanted[..1]);
}

#[test]
fn the_checker_knows_what_a_queue_has_completed() {
    let region = "mr-deregistered-with-work";
    finds("sends-before-a-bind", &[region]);
    finds("more-than-fits", &["qp-destroyed-with-work", "send-queue-unsignaled"]);
    let said = finds("requests-of-one-number", &["rights-too-weak"]);
    assert!(said.contains("rights-too-weak: a READ (wr_id 0x0)"), "{said}");
    let said = finds("receives-of-two", &[region]);
    assert!(said.contains("a receive (wr_id 0x1) of the shared receive queue at 0x"), "{said}");
    finds("completions-that-are-lost", &[region]);
}

#[test]
fn the_checker_sees_a_region_that_is_changed_under_work() {
    let said = finds("changed-with-work", &["mr-deregistered-with-work"]);
    assert!(said.contains(") is changed while a receive (wr_id 0x1)"), "{said}");
}

#[test]
fn the_checker_sees_what_ends_before_its_users() {
    let said = finds("context-closed-in-use", &["ended-in-use"]);
    assert!(said.contains("was closed before the protection domain ended"), "{said}");
    let said = finds("domains-ended-in-use", &["ended-in-use"; 2]);
    for what in ["since a protection domain uses it", "since a queue pair uses it"] {
        assert!(said.contains(what), "{said}");
    }
    let said = finds("parts-ended-in-use", &["ended-in-use"; 2]);
    for what in ["since a memory window uses it", "since a memory region uses it"] {
        assert!(said.contains(what), "{said}");
    }
    let said = finds("channel-destroyed-in-use", &["ended-in-use"]);
    assert!(said.contains("is destroyed while a communication identifier uses it"), "{said}");
}

/// A finding has the number by which the log and `anyverbs show` name the object, and the pointer that the program knows.
#[test]
fn the_checker_names_an_object_as_the_log_does() {
    let (_, said, _) = check(["ended-in-use", "wrong", "plain"], "1", "");
    let number = |from: &str, to: &str| {
        let (_, rest) = said.split_once(from)?;
        rest.split_once(to).map(|(number, _)| number.to_owned())
    };
    let logged = number(": CQ ", " (8 entries) is not destroyed");
    let found = number("the completion queue at 0x", " is not ended");
    let found = found.as_deref().and_then(|at| at.split_once(" (CQ ")?.1.strip_suffix(')'));
    assert!(logged.is_some() && logged.as_deref() == found, "{logged:?}, {found:?}: {said}");
}

#[test]
fn the_checker_blames_the_call_that_waits() {
    // One report of each: the call that was refused waits for nothing.
    finds("refused-and-then-waits", &["ended-in-use", "unacknowledged-event"]);
}

#[test]
fn the_checker_names_a_mode_that_it_does_not_know() {
    for (mode, is_known) in [("yes", false), ("", false), ("1", true), ("report", true)] {
        let (status, said, _) = check(["leak", "right", "plain"], mode, "");
        assert_eq!(status, Some(0), "{said}");
        assert_eq!(said.contains("may be report, fatal or 0"), !is_known, "{mode:?}: {said}");
    }
}

#[test]
fn the_checker_knows_the_rows_of_the_extended_calls() {
    let said = finds("calls-within-rows", &["extended-calls-out-of-order"; 4]);
    for call in ["ibv_post_send", "ibv_wr_abort", "ibv_wr_complete", "ibv_poll_cq"] {
        assert!(said.contains(&format!("{call} is called")), "{said}");
    }
    let said = finds("rows-not-ended", &["extended-calls-out-of-order"; 4]);
    let (said, _) = said.split_once("anyverbs check: summary").unwrap();
    for call in ["ibv_wr_start", "ibv_start_poll", "ibv_destroy_qp", "ibv_destroy_cq"] {
        assert_eq!(said.matches(&format!("{call} is called")).count(), 1, "{call}: {said}");
    }
    let said = finds("fields-without-completion", &["extended-calls-out-of-order"; 2]);
    assert!(said.contains("ibv_wc_read_qp_num is called, and wc_flags of"), "{said}");
    assert!(
        said.contains("ibv_wc_read_vendor_err is called, and there is no completion"),
        "{said}"
    );
}

#[test]
fn the_checker_counts_the_acknowledged_events() {
    finds("unacknowledged-event-of-an-identifier", &["unacknowledged-event"]);
    let said = finds("acknowledged-too-often", &["unacknowledged-event"]);
    assert!(said.contains("acknowledges 2 events of the completion queue at"), "{said}");
    assert!(said.contains(", and 1 of them were read and not acknowledged before"), "{said}");
}

/// As servers of several processes do. The "extended" child ends with 3.
#[test]
fn the_checker_looks_at_a_child_that_was_forked_before_the_device_was_opened() {
    let run = |kind, calls, mode| check(["forks-first", kind, calls], mode, "");
    let wanted = vec!["use-after-destroy".to_owned()];
    for (calls, mode, ends) in [
        ("plain", "1", 66),
        ("extended", "1", 3),
        ("plain", "fatal", 66),
        ("extended", "fatal", 66),
    ] {
        let (status, said, found) = run("wrong", calls, mode);
        assert_eq!((status, found), (Some(ends), wanted.clone()), "{calls} {mode}: {said}");
    }
    let (status, said, found) = run("right", "plain", "1");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

#[test]
fn the_checker_reports_a_post_that_the_persona_refuses() {
    let (status, said, found) = check(["posts-what-a-persona-lacks", "wrong", "plain"], "1", "");
    assert_eq!((status, &found[..]), (Some(66), &["refused-by-persona".to_owned()][..]), "{said}");
    let what = "ibv_post_send is refused: persona without_srq: it lacks atomics";
    assert!(said.contains(what), "{said}");
}

#[test]
fn the_checker_reports_each_limit_of_the_persona_that_a_call_exceeds() {
    let run = |kind| check(["beyond-limits-of-a-persona", kind, "plain"], "1", "");
    let (status, said, found) = run("wrong");
    assert_eq!((status, found), (Some(66), vec!["refused-by-persona".to_owned(); 8]), "{said}");
    for (call, field, asked, limit, name) in [
        ("ibv_create_qp", "max_send_wr", 17, 16, "max_qp_wr"),
        ("ibv_create_qp", "max_recv_wr", 17, 16, "max_qp_wr"),
        ("ibv_create_qp", "max_send_sge", 4, 3, "max_sge"),
        ("ibv_create_qp", "max_recv_sge", 4, 3, "max_sge"),
        ("ibv_create_cq", "cqe", 65, 64, "max_cqe"),
        ("ibv_create_srq", "max_wr of an SRQ", 11, 10, "max_srq_wr"),
        ("ibv_create_srq", "max_sge of an SRQ", 3, 2, "max_srq_sge"),
        ("ibv_modify_qp", "max_rd_atomic", 6, 5, "max_qp_rd_atom"),
    ] {
        let what = format!(
            "{call} is refused: persona small_limits: {field} is {asked}, and the limit is {limit} ({name} of device small0)\n"
        );
        assert!(said.contains(&what), "{what}: {said}");
    }
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

#[test]
fn the_checker_says_whose_datagram_was_dropped() {
    for (id, why) in [
        ("qkey-mismatch", "with Q_Key 0x22222222, and that of the queue pair is 0x11111111"),
        ("pkey-mismatch", "with P_Key 0xffff, and that of the queue pair is 0x8001"),
        ("datagram-without-receive", "and no receive was posted"),
        ("datagram-too-long", "with 48 bytes (40 of them the GRH), and there was room for 47"),
    ] {
        let (_, said, _) = check([id, "wrong", "plain"], "1", "");
        let line =
            said.lines().find(|line| line.contains("has dropped datagrams")).unwrap_or(&said);
        let (whose, first) =
            line.split_once("; the first came from queue pair 0x").unwrap_or_default();
        assert!(whose.ends_with(" (1 so far)") && first.ends_with(why), "{said}");
        // As the log shows addresses.
        let from = first.split_once(" at ").and_then(|(_, rest)| rest.split_once(", "));
        assert!(from.is_some_and(|(ip, _)| ip.parse::<Ipv4Addr>().is_ok()), "{said}");
    }
}

#[test]
fn the_checker_reports_ends_that_differ_at_both() {
    let said = finds("ends-differ", &["ends-differ"]);
    let psn = "a packet with PSN 0x64 came from queue pair 0x";
    assert!(said.contains(psn) && said.contains("and rq_psn is 0x65 here"), "{said}");
    let said = finds("ends-differ-in-psn", &["ends-differ"; 2]);
    let begins = "are dropped: they begin at PSN 0x64, and rq_psn is 0x5f\n";
    assert!(said.contains("does not fit the other end: packets from"), "{said}");
    assert!(said.contains(begins), "{said}");
    let said = finds("ends-differ-in-mtu", &["ends-differ"; 2]);
    assert!(said.contains("path_mtu differs: it is 256 at the responder"), "{said}");
    // Each requester learns it. Those who answer see nothing wrong.
    let said = finds("ends-differ-in-numbers", &["ends-differ"; 2]);
    let pair = |line: &str| {
        let own = line.split_once("queue pair 0x")?.1.get(..6)?.to_owned();
        let end = ", and not to this one; see `anyverbs explain AV1210`";
        let (_, other) = line.strip_suffix(end)?.rsplit_once("queue pair 0x")?;
        Some((own, other.to_owned()))
    };
    let pairs: Vec<_> = said.lines().filter_map(pair).collect();
    let [(a, of_a), (a2, of_a2)] = &pairs[..] else { panic!("{said}") };
    assert!(a != a2 && a == of_a2 && a2 == of_a, "{said}");
}

#[test]
fn the_checker_sees_inline_data_that_a_read_has_still_to_bring() {
    for calls in ["plain", "extended"] {
        let (status, said, found) = check(["inline-read-without-fence", "wrong", calls], "1", "");
        let wanted = vec!["read-without-fence".to_owned()];
        assert_eq!((status, found), (Some(66), wanted), "{calls}: {said}");
        assert!(said.contains("a SEND (wr_id 0x2) of queue pair"), "{calls}: {said}");
        let (status, said, found) = check(["inline-read-without-fence", "right", calls], "1", "");
        assert_eq!((status, found), (Some(0), Vec::new()), "{calls}: {said}");
    }
}

/// The subscriber ends while receives are posted. Both are programs of the book.
#[test]
fn the_checker_finds_nothing_in_the_example_of_datagrams() {
    const SCRIPT: &str = r#"
        ip link set lo up && ip route add 239.0.0.0/8 dev lo src 127.0.0.1
        mkfifo "$1" && exec 3<>"$1"
        "$0" sub 239.7.4.1 1 >&3 & read -r subscribed <&3
        "$0" pub 239.7.4.1 hello; echo "publisher $?"
        wait $!; echo "subscriber $?"
        read -r message <&3; echo "$message""#;
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    let file = |kind: &str| libraries().join(format!("pubsub{kind}.{}", std::process::id()));
    let (program, pipe) = (file(""), file(".pipe"));
    compile("../../../../examples/c/pubsub", &program, &[]);
    let output = Command::new("timeout")
        .args(["-k", "5", "60", "unshare", "-Urn", "sh", "-c", SCRIPT])
        .args([&program, &pipe])
        .env("LD_LIBRARY_PATH", libraries())
        .env("ANYVERBS_CHECK", "1")
        .output()
        .unwrap();
    let _ = (fs::remove_file(program), fs::remove_file(pipe));
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), output.stderr);
    let errors = String::from_utf8_lossy(&errors);
    assert_eq!(said, "publisher 0\nsubscriber 0\nhello\n", "{errors}");
}

/// One report has both ends of a process, and where the region got its rights.
#[test]
fn the_checker_names_the_rights_of_the_region_that_the_peer_may_not_touch() {
    let said = finds("write-without-right", &["rights-too-weak"]);
    let has = |part: &str| assert!(said.contains(part), "{part}: {said}");
    has(" of queue pair 0x");
    has(" failed: the region lacks IBV_ACCESS_REMOTE_WRITE (key 0x");
    has("); the region at 0x");
    has(" (64 bytes) has the rights: LOCAL_WRITE; the peer is queue pair 0x");
    has("  The region was registered here:\n    #0 ");
}

#[test]
fn the_checker_says_which_messages_of_uc_were_dropped() {
    for (id, check_id, why) in [
        ("uc-without-receive", "receive-not-posted", "no receive was posted"),
        ("uc-receive-too-small", "receive-too-small", "and the receive buffer 7"),
        ("uc-without-right", "rights-too-weak", "IBV_ACCESS_REMOTE_WRITE"),
    ] {
        for calls in ["plain", "extended"] {
            let (status, said, found) = check([id, "wrong", calls], "1", "");
            assert_eq!((status, found), (Some(66), vec![check_id.to_owned()]), "{id}: {said}");
            let line = said.lines().find(|line| line.contains("has dropped messages (1 so far)"));
            assert!(line.is_some_and(|line| line.contains(why)), "{id}: {said}");
            let has_region = said.contains("has the rights: LOCAL_WRITE\n")
                && said.contains("The region was registered here");
            assert_eq!(has_region, id == "uc-without-right", "{said}");
            // So does the log, without the checker as well.
            let logs = said.lines().filter(|line| line.contains("UC tells the sender nothing"));
            assert_eq!(logs.count(), 1, "{id}: {said}");
            let (status, said, found) = check([id, "right", calls], "1", "");
            assert_eq!((status, found), (Some(0), Vec::new()), "{id}: {said}");
            assert!(!said.contains("UC tells"), "{id}: {said}");
        }
    }
}

/// A program that waits for good is told while it polls.
#[test]
fn the_checker_reports_a_lost_datagram_at_an_empty_poll() {
    let (status, said, found) = check(["waits-for-a-datagram", "wrong", "plain"], "1", "");
    let wanted = vec!["datagram-without-receive".to_owned()];
    assert_eq!((status, found), (Some(5), wanted), "{said}");
}

/// A program that leaves the end of its queue pair to the process is told when that ends.
#[test]
fn the_checker_reports_a_lost_datagram_when_the_process_ends() {
    let run = |kind| check(["leaves-a-lost-datagram", kind, "plain"], "1", "leak:mistakes");
    let (status, said, found) = run("wrong");
    let wanted = vec!["datagram-without-receive".to_owned()];
    assert_eq!((status, found), (Some(66), wanted), "{said}");
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

/// A queue that was made for one thread is polled by one, and another thread makes the call.
#[test]
fn the_checker_reports_each_call_of_a_second_thread() {
    for (id, call) in [
        ("cq-resized-by-two-threads", "ibv_resize_cq"),
        ("cq-notified-by-two-threads", "ibv_req_notify_cq"),
        ("cq-read-on-by-two-threads", "ibv_next_poll"),
    ] {
        let (status, said, found) = check([id, "wrong", "plain"], "1", "");
        let wanted = vec!["cq-polled-by-two-threads".to_owned()];
        assert_eq!((status, found), (Some(66), wanted), "{id}: {said}");
        assert!(
            said.contains(&format!("a thread calls {call} for the completion queue")),
            "{said}"
        );
        let (status, said, found) = check([id, "right", "plain"], "1", "");
        assert_eq!((status, found), (Some(0), Vec::new()), "{id}: {said}");
    }
}

#[test]
fn the_checker_tells_places_apart_by_the_frames_of_the_program() {
    let (status, said, found) = check(["leaks-of-five-places", "wrong", "plain"], "1", "");
    assert_eq!((status, found), (Some(66), vec!["leak".to_owned(); 5]), "{said}");
}

#[test]
fn the_checker_tells_the_protection_domain_of_the_connection_manager_from_a_leak() {
    let run = |kind| check(["leak-beside-the-connection-manager", kind, "plain"], "1", "");
    let (status, said, found) = run("wrong");
    assert_eq!((status, found), (Some(66), vec!["leak".to_owned()]), "{said}");
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
}

#[test]
fn the_checker_knows_what_of_all_kinds_is_left() {
    let said = finds("domains-left", &["leak"; 5]);
    for what in ["thread domain", "XRC domain", "device memory"] {
        assert_eq!(said.matches(&format!("leak: the {what} at 0x")).count(), 1, "{said}");
    }
    assert_eq!(said.matches("leak: the protection domain at 0x").count(), 2, "{said}");
    let said = finds("identifier-left", &["leak"; 2]);
    for what in ["communication identifier", "queue pair"] {
        assert_eq!(said.matches(&format!("leak: the {what} at 0x")).count(), 1, "{said}");
    }
}

#[test]
fn the_checker_says_how_many_leaks_it_leaves_out() {
    let (status, said, found) = check(["leaks-of-many-places", "wrong", "plain"], "1", "");
    assert_eq!((status, found), (Some(66), vec!["leak".to_owned(); 20]), "{said}");
    let summary = "  leak: 55 objects were not ended: completion queue (55)\n    20 of them are reported above.\n";
    assert!(said.ends_with(summary), "{said}");
    let (status, said, found) =
        check(["leaks-of-many-places", "wrong", "plain"], "1", "leak:mistakes");
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
    assert!(!said.contains("anyverbs check"), "{said}");
}

/// The mistake that made it fail is not buried below its leaks. The file has both.
#[test]
fn the_checker_folds_the_leaks_of_a_program_that_fails() {
    let run = |kind| check(["ends-at-its-first-error", kind, "plain"], "1", "");
    let (status, said, found) = run("wrong");
    let leaks = ["leak"; 7].map(str::to_owned);
    assert_eq!((status, &found[1..]), (Some(3), &leaks[..]), "{said}");
    assert_eq!(found[0], "rights-too-weak");
    assert!(!said.contains("anyverbs check: leak"), "{said}");
    let (_, summary) = said.split_once("anyverbs check: summary\n").unwrap();
    let [mistake, left, folded] = summary.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert!(mistake.starts_with("  rights-too-weak: a receive (wr_id "), "{said}");
    let kinds = "completion queue (2), memory region (2), protection domain (1), queue pair (2)";
    assert_eq!(left, format!("  leak: 7 objects were not ended: {kinds}"));
    assert!(folded.contains("The program failed (status 3)"), "{said}");
    let (status, said, found) = run("right");
    assert_eq!((status, found), (Some(66), vec!["rights-too-weak".to_owned()]), "{said}");
    assert!(
        said.contains("anyverbs check: summary\n  rights-too-weak: ") && !said.contains("leak")
    );
}

#[test]
fn the_checker_lets_destructors_run_and_keeps_the_status_of_a_failure() {
    let number = std::process::id();
    let library = libraries().join(format!("libat_end{number}.so"));
    compile("at_end", &library, &["-DLIBRARY", "-shared", "-fPIC"]);
    let program = libraries().join(format!("at_end.{number}"));
    compile("at_end", &program, &["-Wl,--no-as-needed", library.to_str().unwrap()]);
    let leak = || vec!["leak".to_owned()];
    for (words, status, found) in [
        (&["ends"][..], 0, vec![]),
        (&["ends", "3"], 3, vec![]),
        (&["leaves"], 66, leak()),
        // It has failed, and how is its own matter.
        (&["leaves", "3"], 3, leak()),
        // The parent of a process sees 256 as 0.
        (&["leaves", "256"], 66, leak()),
    ] {
        let (ended, said, checks) = check_program(&program, words, ("1", ""), &[]);
        let word = words.join(" ");
        assert_eq!((ended, checks), (Some(status), found), "{word}: {said}");
        for line in ["the destructor has run", "the library's destructor has run"] {
            assert_eq!(said.matches(line).count(), 1, "{word}: {said}");
        }
    }
    let _ = (fs::remove_file(program), fs::remove_file(library));
}

/// They make no mistakes, but use much of the library. Of the last one, deliberate mistakes are left out.
#[test]
fn the_checker_says_nothing_of_larger_programs() {
    let rules = env::temp_dir().join(format!("anyverbs-check-rules-{}", std::process::id()));
    // Some refusals are what they test: of counters and regions that are gone, and of device memory in use.
    let refusals =
        "use-after-destroy:comp_cntr.c\nuse-after-destroy:memory.c\nended-in-use:memory.c";
    fs::write(&rules, refusals).unwrap();
    for name in ["cm_threads", "cm_xrc"] {
        run_with(name, &[("ANYVERBS_CHECK", "1")]);
    }
    let rules_path = rules.to_str().unwrap();
    let settings = [("ANYVERBS_CHECK", "1"), ("ANYVERBS_CHECK_SUPPRESSIONS", rules_path)];
    for name in ["comp_cntr", "memory"] {
        run_with(name, &settings);
    }
    // It destroys a queue pair that is in a group, to see the refusal.
    fs::write(&rules, "ended-in-use:mcast.c").unwrap();
    run_with("mcast", &settings);
    fs::remove_file(&rules).unwrap();
}

/// A program that looks at such a field goes astray.
#[test]
fn the_checker_poisons_undefined_fields_of_failed_completions() {
    let run = |kind, mode| check(["failed-wc-opcode", kind, "plain"], mode, "");
    let (status, said, found) = run("wrong", "1");
    assert_eq!((status, found), (Some(3), Vec::new()), "{said}");
    assert!(said.contains("note: work has failed") && said.contains("0x5a5a5a5a"), "{said}");
    assert_eq!(run("right", "1").0, Some(0));
    assert_eq!(run("wrong", "0").0, Some(0));
}

/// The names of all checks: their pages.
fn checks() -> Vec<String> {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/checks");
    let stem = |page: fs::DirEntry| page.path().file_stem().unwrap().to_str().unwrap().to_owned();
    let names = fs::read_dir(pages).unwrap().map(|page| stem(page.unwrap()));
    let mut names: Vec<_> = names.filter(|name| name != "index").collect();
    names.sort();
    assert!(names.len() >= 7);
    names
}

#[test]
fn the_checker_obeys_its_settings() {
    let id = "buffer-changed";
    let rule = "buffer-changed:mistakes.c # known";
    let (status, said, found) = check([id, "wrong", "plain"], "1", rule);
    assert_eq!((status, found), (Some(0), Vec::new()), "{said}");
    let (status, said, found) = check([id, "wrong", "plain"], "1", "leak:mistakes.c");
    assert_eq!((status, found.len()), (Some(66), 1), "{said}");
    // A rule that is none would change what is found: no rule of the file holds.
    let (status, said, found) = check([id, "wrong", "plain"], "1", &format!("{rule}\nleak\n"));
    assert_eq!((status, found.len()), (Some(66), 1), "{said}");
    let why = "cannot be used: line 2: a rule is CHECK:PART, and this has no colon: \"leak\"";
    assert!(said.contains("no finding is left out") && said.contains(why), "{said}");
    // The program ends at once: nothing that is left then is a leak.
    let (status, said, found) = check([id, "wrong", "plain"], "fatal", "");
    assert_eq!((status, &found[..]), (Some(66), &[id.to_owned()][..]), "{said}");
    let (status, said, found) = check([id, "wrong", "plain"], "0", "");
    assert_eq!((status, found, said.as_str()), (Some(0), Vec::new(), ""));
}

/// Compiles a program of its own, runs it under the checker, and removes it.
fn check_alone(
    name: &str,
    options: &[&str],
    words: &[&str],
    mode: &str,
) -> (Option<i32>, String, Vec<String>) {
    let program = libraries().join(format!("{name}-{}.{}", words[0], std::process::id()));
    compile(name, &program, options);
    let found = check_program(&program, words, (mode, ""), &[]);
    let _ = fs::remove_file(program);
    found
}

const INLINE_TOO_LONG: &str = "inline-too-long";

#[test]
fn a_thread_that_is_cancelled_in_a_finding_stops_no_other() {
    let (status, said, found) = check_alone("cancelled_in_finding", &[], &[""], "1");
    assert_eq!((status, &found[..]), (Some(66), &[INLINE_TOO_LONG.to_owned()][..]), "{said}");
}

#[test]
fn a_fatal_finding_ends_the_program_whatever_its_other_threads_do() {
    let file = env::temp_dir().join(format!("anyverbs-fatal-{}", std::process::id()));
    for (word, is_in_file) in [("alone", true), ("reads", false)] {
        let words = [word, file.to_str().unwrap()];
        let (status, said, found) = check_alone("fatal_beside_reader", &[], &words, "fatal");
        assert_eq!((status, found), (Some(66), vec![INLINE_TOO_LONG.to_owned()]), "{word}: {said}");
        assert!(said.contains("on standard output"), "{word}: {said}");
        let written = fs::read_to_string(&file).unwrap();
        assert!(written == "in the file" || !is_in_file, "{word}: {written}");
    }
    let _ = fs::remove_file(file);
}

#[test]
fn a_program_that_loads_the_library_late_ends() {
    for word in ["ends", "leaves"] {
        let options = ["-Wl,--as-needed"];
        let (status, said, found) = check_alone("loads_late", &options, &[word], "1");
        assert_eq!((status, found), (Some(66), vec!["leak".to_owned()]), "{word}: {said}");
        assert!(said.contains("the handler has run"), "{word}: {said}");
    }
}

#[test]
fn a_list_that_the_device_does_not_read_is_not_read() {
    let (status, said, found) = check_alone("lists_under_check", &[], &["count"], "1");
    assert_eq!((status, found), (Some(0), vec![]), "{said}");
}

#[test]
fn inline_data_of_a_row_that_has_failed_is_no_mistake_of_another_request() {
    let (status, said, found) = check_alone("lists_under_check", &[], &["failed"], "1");
    assert_eq!((status, found), (Some(0), vec![]), "{said}");
}

#[test]
fn a_post_to_no_queue_pair_leaves_the_checks_on() {
    let (status, said, found) = check_alone("lists_under_check", &[], &["null"], "1");
    let wanted = vec!["mr-deregistered-with-work".to_owned()];
    assert_eq!((status, found), (Some(66), wanted), "{said}");
}

#[test]
fn a_thread_that_loads_a_library_and_one_that_makes_calls_both_end() {
    let file = |name: &str| libraries().join(format!("{name}{}", std::process::id()));
    let (library, program) = (file("libloads.so"), file("loads_library"));
    compile("loads_library", &library, &["-DLIBRARY", "-shared", "-fPIC"]);
    compile("loads_library", &program, &["-rdynamic"]);
    // A rule about a site looks for the names of callers, as a report does.
    let script: &[_] = &[("ANYVERBS_FAULTS", "ibv_alloc_pd from nowhere fails with EIO")];
    for (word, configuration, findings) in
        [("first", &[][..], 1), ("later", &[], 2), ("later", script, 2)]
    {
        let words = [library.to_str().unwrap(), word];
        let (status, said, found) = check_program(&program, &words, ("1", ""), configuration);
        let wanted = vec![INLINE_TOO_LONG; findings];
        assert_eq!(
            (status, found.iter().map(String::as_str).collect()),
            (Some(66), wanted),
            "{word}: {said}"
        );
        assert!(said.contains("loads_library.c:"), "{word}: {said}");
    }
    let _ = (fs::remove_file(program), fs::remove_file(library));
}
