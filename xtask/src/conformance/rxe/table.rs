//! The meaning of the cases of `conformance/rxe.toml`: where they run, and which packets each of them may put on the
//! wire.

use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::ensure;
use serde::Deserialize;

use crate::conformance::table::{self, Operation, Place};

/// The place of the client, and the addresses by which the sides know each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Direction {
    /// Here; the server is in the guest.
    ToRxe,
    /// The client is in the guest; the server is here.
    FromRxe,
    ToRxeIpv6,
    FromRxeIpv6,
    /// The sides use link-local addresses with their scope.
    ToRxeLinkLocal,
    FromRxeLinkLocal,
}

/// Kinds of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Ipv4,
    Ipv6,
    LinkLocal,
}

impl Direction {
    pub(super) fn client_is_here(self) -> bool {
        matches!(self, Direction::ToRxe | Direction::ToRxeIpv6 | Direction::ToRxeLinkLocal)
    }

    pub(super) fn family(self) -> Family {
        match self {
            Direction::ToRxe | Direction::FromRxe => Family::Ipv4,
            Direction::ToRxeIpv6 | Direction::FromRxeIpv6 => Family::Ipv6,
            Direction::ToRxeLinkLocal | Direction::FromRxeLinkLocal => Family::LinkLocal,
        }
    }
}

impl Place for Direction {
    fn name(self) -> &'static str {
        match self {
            Direction::ToRxe => "to-rxe",
            Direction::FromRxe => "from-rxe",
            Direction::ToRxeIpv6 => "to-rxe-ipv6",
            Direction::FromRxeIpv6 => "from-rxe-ipv6",
            Direction::ToRxeLinkLocal => "to-rxe-link-local",
            Direction::FromRxeLinkLocal => "from-rxe-link-local",
        }
    }
}

pub(super) type Case = table::Case<Direction>;

impl Operation {
    /// BTH opcodes of the requests.
    pub(super) fn requests(self) -> RangeInclusive<u8> {
        match self {
            Operation::RcSend => 0x00..=0x05,
            Operation::RcWrite => 0x06..=0x0b,
            Operation::RcRead => 0x0c..=0x0c,
            Operation::RcCompareSwap => 0x13..=0x13,
            Operation::RcFetchAdd => 0x14..=0x14,
            Operation::UcSend => 0x20..=0x25,
            Operation::UcWrite => 0x26..=0x2b,
            Operation::UdSend => 0x64..=0x65,
            Operation::RcSendInvalidate => 0x16..=0x17,
            Operation::RcAtomicWrite => 0x1d..=0x1d,
            Operation::Cm => 0x64..=0x64,
        }
    }

    /// BTH opcodes of the answers without errors; `None` where there is no answer.
    pub(super) fn answers(self) -> Option<RangeInclusive<u8>> {
        match self {
            Operation::RcSend | Operation::RcWrite | Operation::RcSendInvalidate => {
                Some(0x11..=0x11)
            }
            Operation::RcRead => Some(0x0d..=0x10),
            // The same opcode as a READ's last response, without payload.
            Operation::RcAtomicWrite => Some(0x10..=0x10),
            Operation::RcCompareSwap | Operation::RcFetchAdd => Some(0x12..=0x12),
            Operation::UcSend | Operation::UcWrite | Operation::UdSend | Operation::Cm => None,
        }
    }

    /// Whether the device probes for credit before it sends: on unreliable paths, but not to QP 1.
    pub(super) fn is_paced(self) -> bool {
        matches!(self, Operation::UcSend | Operation::UcWrite | Operation::UdSend)
    }
}

impl Case {
    /// The name as a file's, without an extension.
    pub(super) fn file_name(&self) -> String {
        let name = self.name();
        let words: Vec<_> = name
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty())
            .collect();
        words.join("-")
    }

    /// Whether its program is the project's own, and made for the case.
    pub(super) fn is_own(&self) -> bool {
        self.source.is_some() || self.example
    }

    /// The operations that a side posts.
    pub(super) fn posts(&self, client: bool) -> &[Operation] {
        if client { &self.client_posts } else { &self.server_posts }
    }
}

/// Reads and expands the table.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Case>> {
    let cases = table::read::<Direction>(path)?;
    check(&cases)?;
    Ok(cases)
}

/// Finds cases that this suite cannot run.
fn check(cases: &[Case]) -> anyhow::Result<()> {
    for case in cases {
        let name = case.name();
        ensure!(!case.client_posts.is_empty(), "nothing on the wire to check in {name:?}");
        ensure!(
            case.kill_server_at.is_none() || !case.place.client_is_here(),
            "only a server here can be killed in {name:?}"
        );
        let single = case.kind == table::Kind::Pair
            && (case.pairs, case.clients) == (1, 1)
            && !case.second_server;
        ensure!(single, "{name:?} is not one server and one client");
    }
    let mut files: Vec<_> = cases.iter().map(Case::file_name).collect();
    files.sort_unstable();
    ensure!(files.windows(2).all(|pair| pair[0] != pair[1]), "two cases have one file's name");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand(text: &str) -> anyhow::Result<Vec<Case>> {
        let cases = table::expand(text)?;
        check(&cases)?;
        Ok(cases)
    }

    #[test]
    fn the_projects_table_is_sound() {
        let cases = read(&crate::workspace::root().join("conformance/rxe.toml")).unwrap();
        for tool in [
            "ibv_rc_pingpong",
            "ibv_uc_pingpong",
            "ibv_ud_pingpong",
            "ibv_srq_pingpong",
            "ib_send_bw",
            "ib_write_bw",
            "ib_read_bw",
            "ib_atomic_bw",
            "anywhere",
        ] {
            for direction in [Direction::ToRxe, Direction::FromRxe] {
                let found = cases.iter().any(|case| {
                    case.default
                        && case.place == direction
                        && case.command.split(' ').next() == Some(tool)
                });
                assert!(found, "{tool} {direction:?}");
            }
        }
    }

    #[test]
    fn names_are_fit_for_files() {
        let cases = expand(
            "[[group]]\non = ['to-rxe', 'from-rxe']\ncommand = 'ib_read_bw -s {1,2}'\nreport = 'perftest'\nclient-posts = ['rc-read']\n",
        )
        .unwrap();
        let names: Vec<_> = cases.iter().map(Case::file_name).collect();
        assert_eq!(
            names,
            [
                "to-rxe-ib_read_bw-s-1",
                "from-rxe-ib_read_bw-s-1",
                "to-rxe-ib_read_bw-s-2",
                "from-rxe-ib_read_bw-s-2"
            ]
        );
        assert_eq!(cases[0].posts(true), [Operation::RcRead]);
        assert!(cases[0].posts(false).is_empty());
    }

    #[test]
    fn unsupported_cases_are_refused() {
        let group = |more: &str| {
            format!(
                "[[group]]\non = ['to-rxe']\ncommand = 'a {{-b,-b -}}'\nreport = 'pingpong'\n{more}\n"
            )
        };
        let one = |more: &str| group(more).replace("{-b,-b -}", "");
        assert!(expand(&one("client-posts = ['rc-send']")).is_ok());
        assert!(expand(&group("client-posts = ['rc-send']")).is_err(), "one file for two");
        assert!(expand(&one("")).is_err(), "nothing on the wire to check");
        assert!(expand(&one("client-posts = ['rc-send']\npairs = 2")).is_err());
        assert!(expand(&one("client-posts = ['rc-send']\nclients = 2")).is_err());
        assert!(expand(&one("client-posts = ['rc-send']\nkind = 'alone'")).is_err());
    }
}
