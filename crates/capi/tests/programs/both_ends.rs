//! Programs under `anyverbs run --check`, of two processes on one host and on two: one makes a mistake, the other is its peer.

use super::*;

/// The mistakes of `mistakes_of_hosts.c`, and what is reported where.
const MISTAKES: &[Mistake] = &[
    Mistake {
        name: "lkey-used-as-rkey",
        maker: &["lkey-used-as-rkey"],
        peer: &[],
        words: &[("maker", "a local key stands where a remote key belongs")],
    },
    Mistake {
        name: "region-without-right",
        maker: &["rights-too-weak"],
        peer: &["rights-too-weak"],
        words: &[
            ("maker", " has refused its peer: a WRITE of queue pair 0x"),
            ("maker", " bytes) has the rights: LOCAL_WRITE"),
            ("maker", "The region was registered here"),
            ("maker", "was refused: the region lacks IBV_ACCESS_REMOTE_WRITE"),
            ("peer", "failed: the region lacks IBV_ACCESS_REMOTE_WRITE (key 0x"),
        ],
    },
    Mistake {
        name: "receive-without-right",
        maker: &["rights-too-weak"],
        peer: &[],
        words: &[("maker", "lacks LOCAL_WRITE, and its rights are: none")],
    },
    Mistake {
        name: "pd-mismatch",
        maker: &["pd-mismatch"],
        peer: &["pd-mismatch"],
        words: &[
            ("maker", " has refused its peer: a WRITE of queue pair 0x"),
            ("maker", "was refused: the region is of protection domain 2, and the queue pair of 1"),
            ("maker", " bytes) belongs to the protection domain at 0x"),
            ("maker", "The region was registered here"),
            (
                "peer",
                "failed: the region is of protection domain 2, and the queue pair of 1 (key 0x",
            ),
            ("peer", "); both numbers are those of the peer"),
        ],
    },
    Mistake {
        name: "use-after-destroy",
        maker: &[],
        peer: &["use-after-destroy"],
        words: &[("maker", "was refused: the region of the key was deregistered ")],
    },
    Mistake {
        name: "receive-too-small",
        maker: &["receive-too-small"],
        peer: &["receive-too-small"],
        words: &[
            ("maker", "failed: the message has 8 bytes or more, and the receive buffer 7"),
            ("peer", "failed: the message has 8 bytes or more, and the receive buffer 7"),
        ],
    },
    Mistake {
        name: "receive-not-posted",
        maker: &["receive-not-posted"],
        peer: &["receive-not-posted"],
        words: &[
            ("maker", " was given up: no receive was posted "),
            ("maker", " had no receive: a message of queue pair 0x"),
            ("peer", ", and rnr_retry is 1; see `anyverbs explain AV1301`"),
        ],
    },
    Mistake {
        name: "ends-differ-in-psn",
        maker: &["ends-differ"],
        peer: &["ends-differ"],
        words: &[
            ("maker", "failed: the packet sequence numbers of the two ends do not fit"),
            ("peer", "are dropped: they begin at PSN 0x64, and rq_psn is 0x1"),
        ],
    },
    Mistake {
        name: "ends-differ-in-psn-of-a-write",
        maker: &["ends-differ"],
        peer: &["ends-differ"],
        words: &[
            ("maker", "failed: the packet sequence numbers of the two ends do not fit"),
            ("peer", "are dropped: they begin at PSN 0x64, and rq_psn is 0x1"),
        ],
    },
    Mistake {
        name: "ends-differ-in-mtu",
        maker: &["ends-differ"],
        peer: &["ends-differ"],
        words: &[
            ("maker", "was refused: path_mtu differs: it is 512 at the responder"),
            ("peer", "path_mtu differs: it is 512 at the responder"),
        ],
    },
    Mistake {
        name: "ends-differ-in-number",
        maker: &[],
        peer: &["ends-differ"],
        words: &[("peer", ", and not to this one; see `anyverbs explain AV1210`")],
    },
    Mistake {
        name: "ends-differ-in-address",
        maker: &["ends-differ"],
        peer: &["ends-differ"],
        words: &[
            ("maker", "are dropped: they go to "),
            ("peer", "failed: the peer's queue pair is connected to another address"),
        ],
    },
    Mistake {
        name: "ends-differ-in-partition",
        maker: &["ends-differ"],
        peer: &["ends-differ"],
        words: &[
            ("maker", "they have P_Key 0xffff, and that of the queue pair is 0x8001"),
            ("peer", "failed: the P_Keys of the two queue pairs do not match"),
        ],
    },
    Mistake {
        name: "ends-differ-in-type",
        maker: &["ends-differ"],
        peer: &["ends-differ"],
        words: &[("maker", "are dropped: the queue pair is of type UC")],
    },
    Mistake {
        name: "qkey-mismatch",
        maker: &[],
        peer: &["qkey-mismatch"],
        words: &[("peer", "with Q_Key 0x22222222, and that of the queue pair is 0x11111111")],
    },
    Mistake {
        name: "pkey-mismatch",
        maker: &[],
        peer: &["pkey-mismatch"],
        words: &[("peer", "with P_Key 0x8001, and that of the queue pair is 0xffff")],
    },
    Mistake {
        name: "datagram-without-receive",
        maker: &["datagram-without-receive"],
        peer: &[],
        words: &[("maker", "and no receive was posted")],
    },
    Mistake {
        name: "datagram-too-long",
        maker: &["datagram-too-long"],
        peer: &[],
        words: &[("maker", "with 48 bytes (40 of them the GRH), and there was room for 47")],
    },
    Mistake {
        name: "uc-without-receive",
        maker: &["receive-not-posted"],
        peer: &[],
        words: &[("maker", "has dropped messages (1 so far)"), ("maker", "no receive was posted")],
    },
    Mistake {
        name: "uc-receive-too-small",
        maker: &["receive-too-small"],
        peer: &[],
        words: &[("maker", "and the receive buffer 7")],
    },
    Mistake {
        name: "uc-without-right",
        maker: &["rights-too-weak"],
        peer: &[],
        words: &[("maker", "IBV_ACCESS_REMOTE_WRITE")],
    },
    Mistake { name: "buffer-changed", maker: &["buffer-changed"], peer: &[], words: &[] },
    Mistake {
        name: "mr-deregistered-with-work",
        maker: &["mr-deregistered-with-work"],
        peer: &[],
        words: &[],
    },
    Mistake { name: "read-without-fence", maker: &["read-without-fence"], peer: &[], words: &[] },
];

struct Mistake {
    name: &'static str,
    /// The checks that each process reports.
    maker: &'static [&'static str],
    peer: &'static [&'static str],
    /// A part of the words of one of them.
    words: &'static [(&'static str, &'static str)],
}

/// The end of one of the two processes.
#[derive(Debug, Default, PartialEq)]
struct End {
    status: Option<i32>,
    found: Vec<String>,
}

/// Runs the program with these words: the process that makes the mistake, its peer, and what both said.
fn run_both(words: [&str; 4]) -> (End, End, String) {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let program = libraries().join(format!("mistakes_of_hosts.{}", std::process::id()));
        compile("mistakes_of_hosts", &program, &[]);
        program
    });
    let name = format!("anyverbs-ends-{}-{}", words.join("-"), std::process::id());
    let report = env::temp_dir().join(&name);
    let mut command = Command::new("timeout");
    if words[0].contains("pkey") || words[0].contains("partition") {
        partitions(&mut command, words[2] == "two");
    }
    let output = command
        .args(["60", "unshare", "-n"])
        .arg(program)
        .args(words)
        .env("LD_LIBRARY_PATH", libraries())
        .env("ANYVERBS_REGISTRY", format!("anyverbs-ends-{}", std::process::id()))
        .env("ANYVERBS_UDP_PORT", "4791")
        .env("ANYVERBS_CHECK", "1")
        .env("ANYVERBS_CHECK_REPORT", &report)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let lines = fs::read_to_string(&report).unwrap_or_default();
    let _ = fs::remove_file(&report);
    let end = |who: &str| {
        let of = |line: &str| {
            let rest = line.strip_prefix(who)?.strip_prefix(": process ")?;
            let (process, status) = rest.split_once(" ended with ")?;
            Some((process.to_owned(), status.parse().ok()))
        };
        let Some((process, status)) = said.lines().find_map(of) else { return End::default() };
        let is_its = |line: &&str| line.contains(&format!(r#""process":{process},"#));
        let check = |line: &str| {
            let (_, rest) = line.split_once(r#""check":""#).unwrap();
            rest.split('"').next().unwrap().to_owned()
        };
        End { status, found: lines.lines().filter(is_its).map(check).collect() }
    };
    (end("maker"), end("peer"), said)
}

/// On this number of hosts, whoever makes the mistake.
fn both_ends_report(place: &str) {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let end = |checks: &[&str]| End {
        status: Some(if checks.is_empty() { 0 } else { 66 }),
        found: checks.iter().map(|check| (*check).to_owned()).collect(),
    };
    let mut wrong = Vec::new();
    for mistake in MISTAKES {
        for who in ["first", "second"] {
            let at = format!("{} {place} {who}", mistake.name);
            let (maker, peer, said) = run_both([mistake.name, "wrong", place, who]);
            if (&maker, &peer) != (&end(mistake.maker), &end(mistake.peer)) {
                wrong.push(format!("{at}: maker {maker:?}, peer {peer:?}\n{said}"));
            }
            for (who, words) in mistake.words {
                let has = |line: &str| line.starts_with(who) && line.contains(words);
                if !said.lines().any(has) {
                    wrong.push(format!("{at}: the {who} does not say: {words}\n{said}"));
                }
            }
            let (maker, peer, said) = run_both([mistake.name, "right", place, who]);
            if (&maker, &peer) != (&end(&[]), &end(&[])) {
                wrong.push(format!("{at}, right: maker {maker:?}, peer {peer:?}\n{said}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_checker_looks_at_both_ends_on_one_host() {
    both_ends_report("one");
}

#[test]
fn the_checker_looks_at_both_ends_on_two_hosts() {
    both_ends_report("two");
}
