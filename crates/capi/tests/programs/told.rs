//! The lines that the log has of mistakes.

use super::*;

/// The lines of `told.c`, and how often each comes: the ends of a connection are both in the process.
const LINES: &[(&str, &str, usize)] = &[
    ("the memory window is not bound (key ", "AV1011", 2),
    ("the memory window was invalidated ", "AV1011", 2),
    ("the memory window lacks IBV_ACCESS_REMOTE_READ (key ", "AV1014", 2),
    ("the range ends 4 bytes behind the memory window (key ", "AV1013", 2),
    // The peer learns that there is another key, and not which.
    ("the memory window was bound anew, and its key is 0x", "AV1012", 1),
    ("the memory window was bound anew, and has another key (key ", "AV1012", 1),
    ("the memory window of the key was deallocated ", "AV1002", 2),
    ("the region or window is zero-based: its addresses count from 0 (key ", "AV1015", 2),
    ("and the SRQ of ", "AV0404", 1),
    (
        "the peer's memory is mapped without the permission that the operation needs (key ",
        "AV1016",
        2,
    ),
    ("the memory is mapped without the permission that the operation needs (key ", "AV0409", 1),
    (
        "the range is not within the region by far; the log of the peer says by how much (key ",
        "AV1005",
        1,
    ),
    (" bytes behind the region (key ", "AV1005", 1),
    (" cannot be invalidated;", "AV0602", 1),
    ("the peer could not invalidate the key that a SEND names;", "AV1217", 1),
    ("ibv_create_qp: objects that were inherited across fork do no work;", "EIO", 1),
    (": objects that were inherited across fork do no work;", "EIO", 2),
    ("a completion queue of 2 entries has overrun: ", "AV7001", 20),
    (" requests, of 1 queue pair and 1 SRQ;", "AV7001", 20),
    (" is taken: another id holds it;", "EADDRINUSE", 1),
    (
        " is taken: another id holds it, and one of the two is bound to all addresses;",
        "EADDRNOTAVAIL",
        1,
    ),
    (
        "the program there called rdma_reject, or destroyed the id of the request (rdma_destroy_id);",
        "RDMA_CM_EVENT_REJECTED",
        1,
    ),
    (" (32 entries) is not destroyed: in use by 1 QP;", "AV8009", 1),
    ("opcode is IBV_WR_TSO, which goes with raw packets alone;", "AV8013", 1),
    (
        "send_ops_flags at the creation of the queue pair lacks IBV_QP_EX_WITH_RDMA_WRITE;",
        "AV8013",
        1,
    ),
    ("the queue pair has an SRQ: call ibv_post_srq_recv;", "AV8013", 1),
    ("the queue is in RESET, and takes no receives before it leaves it;", "AV8013", 1),
    ("sgid_index 0, dgid ::; dgid is no address);", "AV8004", 1),
    ("ibv_create_ah: invalid address: grh.dgid is that of no port (::);", "AV8004", 1),
    ("no connection to 127.0.0.1:", "RDMA_CM_EVENT_REJECTED", 2),
    (
        "rdma_connect was called for an id without a queue pair, and qp_num of its parameters is 0;",
        "RDMA",
        1,
    ),
    ("ibv_poll_cq of CQ ", "EINVAL", 1),
];

const OF_RAW_PACKETS: &[(&str, &str, usize)] = &[
    ("(IBV_WC_LOC_LEN_ERR): the frame has 5 bytes, and it must have between 14 and ", "AV0104", 1),
    ("(IBV_WC_LOC_PROT_ERR): the local key names no region (key ", "AV0401", 1),
];

#[test]
fn the_log_names_what_was_wrong() {
    let merged = ["sh", "-c", "exec \"$@\" 2>&1", "sh"];
    let halves = [&[][..], &["second"]].map(|half| run_below("told", &merged, half, &[]));
    let said = halves.concat();
    let is_raw = said.contains("\nraw packets\n");
    let all = LINES.iter().chain(OF_RAW_PACKETS.iter().filter(|_| is_raw));
    for (text, page, times) in all {
        let lines: Vec<_> = said.lines().filter(|line| line.contains(text)).collect();
        let has_page = lines.iter().all(|line| line.contains("ERROR") && line.contains(page));
        assert!(lines.len() == *times && has_page, "{text}: {lines:?}\n{said}");
    }
    assert!(!said.contains("wc_flags"), "programs try that out: {said}");
    let said = run_below("told", &merged, &[], &[("ANYVERBS_LOG", "debug")]);
    let tried =
        "refused: ibv_create_cq_ex: wc_flags has a field of completions that is not known here";
    assert!(said.lines().any(|line| line.contains("DEBUG") && line.ends_with(tried)), "{said}");
}

#[test]
fn a_work_queue_that_is_full_says_so() {
    let merged = ["sh", "-c", "exec \"$@\" 2>&1", "sh"];
    let said = run_below("wq", &merged, &[], &[]);
    let full = ": the queue is full: it holds 16 receives; see `anyverbs explain ENOMEM`";
    let lines: Vec<_> = said.lines().filter(|line| line.ends_with(full)).collect();
    let is_it = lines.len() == 1 && lines[0].contains("refused: ibv_post_wq_recv to work queue 0x");
    assert!(is_it, "{said}");
}

#[test]
fn the_checker_tells_windows_from_regions_and_srqs_from_queue_pairs() {
    let program = libraries().join(format!("told.{}", std::process::id()));
    compile("told", &program, &[]);
    let (_, said, found) = checker::check_program(&program, &["told"], ("1", ""), &[]);
    let _ = fs::remove_file(&program);
    let reports = |check: &str| found.iter().filter(|name| *name == check).count();
    // The window that lacks a right is reported, and those that are not bound are not.
    assert_eq!(reports("rights-too-weak"), 1, "{said}");
    assert!(
        said.contains("failed: the memory window lacks IBV_ACCESS_REMOTE_READ (key 0x"),
        "{said}"
    );
    assert_eq!(reports("pd-mismatch"), 1, "{said}");
    assert!(
        said.contains(", and the SRQ at 0x") && said.contains("The SRQ was made here"),
        "{said}"
    );
}

/// Devices of a process have one table of keys. The peer's own line does not tell it which devices the other process has.
#[test]
fn the_log_names_the_device_of_a_key() {
    let two = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];
    let said = run_below("keys_of_devices", &["sh", "-c", "exec \"$@\" 2>&1", "sh"], &[], &two);
    let end = "; the memory is of device anyverbs1, and the queue pair of anyverbs0; see `anyverbs explain ";
    let line = |code: &str, of: &str| {
        let has = |line: &&str| line.contains(code) && line.contains(of);
        said.lines().find(has).unwrap_or_else(|| panic!("{code}: {said}"))
    };
    assert!(line("AV0404", "failed with status 4").contains(end), "{said}");
    assert!(line("AV1004", "was refused").contains(end), "{said}");
    assert!(!line("AV1004", "failed with status 10").contains("of device"), "{said}");
}
