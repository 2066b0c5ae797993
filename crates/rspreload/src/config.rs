//! The kinds of sockets that become rsockets.

use core::ffi::{CStr, c_int};
use std::fs;
use std::sync::OnceLock;

/// rdma-core's file: lines of program, domain, type and protocol, each of which may be `*`.
const FILE: &str = "/etc/rdma/rsocket/preload_config";
/// `stream`, `dgram`, or both with a comma; overrides the file.
const VARIABLE: &str = "ANYVERBS_SOCKETS";

/// One kind of socket that is taken; `None`: any.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    /// The beginning of the program's name.
    program: Option<String>,
    domain: Option<c_int>,
    kind: Option<c_int>,
    protocol: Option<c_int>,
}

const STREAMS: Rule =
    Rule { program: None, domain: None, kind: Some(libc::SOCK_STREAM), protocol: None };

/// The settings of the environment and the file.
#[derive(Debug)]
struct Config {
    rules: Vec<Rule>,
    /// Sizes that new sockets begin with, by option.
    sizes: Vec<(c_int, c_int)>,
}

fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let rules = match anyverbs_environment::text(VARIABLE) {
            Some(kinds) => from_variable(&kinds),
            None => fs::read_to_string(FILE).map(|text| from_file(&text)).unwrap_or_default(),
        };
        let size = |variable: &str| anyverbs_environment::text(variable)?.trim().parse().ok();
        let sizes = [
            ("RS_SQ_SIZE", crate::rdma::RDMA_SQSIZE),
            ("RS_RQ_SIZE", crate::rdma::RDMA_RQSIZE),
            ("RS_INLINE", crate::rdma::RDMA_INLINE),
        ];
        Config {
            rules: if rules.is_empty() { vec![STREAMS] } else { rules },
            sizes: sizes
                .iter()
                .filter_map(|(variable, option)| Some((*option, size(variable)?)))
                .filter(|(_, size)| *size > 0)
                .collect(),
        }
    })
}

fn from_variable(kinds: &str) -> Vec<Rule> {
    kinds
        .split(',')
        .filter_map(|kind| {
            let kind = match kind.trim() {
                "stream" => libc::SOCK_STREAM,
                "dgram" => libc::SOCK_DGRAM,
                _ => return None,
            };
            Some(Rule { kind: Some(kind), ..STREAMS })
        })
        .collect()
}

fn from_file(text: &str) -> Vec<Rule> {
    let rule = |line: &str| {
        let mut words = line.split_whitespace();
        let mut next = || words.next();
        let [program, domain, kind, protocol] = [next()?, next()?, next()?, next()?];
        // `None`: a word that is not known; `Some(None)`: any.
        let named = |word: &str, prefixes: [&str; 2], names: &[(&str, c_int)]| {
            if word == "*" {
                return Some(None);
            }
            let word = word.to_ascii_uppercase();
            let word = prefixes.iter().find_map(|p| word.strip_prefix(p)).unwrap_or(&word);
            names.iter().find(|(name, _)| *name == word).map(|(_, value)| Some(*value))
        };
        Some(Rule {
            program: (program != "*").then(|| program.to_owned()),
            domain: named(
                domain,
                ["AF_", "PF_"],
                &[("INET", libc::AF_INET), ("INET6", libc::AF_INET6), ("IB", libc::AF_IB)],
            )?,
            kind: named(
                kind,
                ["SOCK_", "SOCK_"],
                &[("STREAM", libc::SOCK_STREAM), ("DGRAM", libc::SOCK_DGRAM)],
            )?,
            protocol: named(
                protocol,
                ["IPPROTO_", "IPPROTO_"],
                &[("TCP", libc::IPPROTO_TCP), ("UDP", libc::IPPROTO_UDP)],
            )?,
        })
    };
    text.lines().filter(|line| !line.starts_with('#')).filter_map(rule).collect()
}

unsafe extern "C" {
    static program_invocation_short_name: *const core::ffi::c_char;
}

/// Whether a socket of this kind is to be an rsocket.
pub(crate) fn wants(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let kind = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let own = match kind {
        libc::SOCK_STREAM => libc::IPPROTO_TCP,
        libc::SOCK_DGRAM => libc::IPPROTO_UDP,
        _ => return false,
    };
    let protocol = if protocol == 0 { own } else { protocol };
    if protocol != own || !matches!(domain, libc::AF_INET | libc::AF_INET6) {
        return false;
    }
    // SAFETY: glibc sets it before any constructor runs; a NUL-terminated string for good.
    let program = unsafe { CStr::from_ptr(program_invocation_short_name) };
    let program = program.to_string_lossy();
    config().rules.iter().any(|rule| fits(rule, &program, domain, kind, protocol))
}

fn fits(rule: &Rule, program: &str, domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let is = |wanted: Option<c_int>, value| wanted.is_none_or(|wanted| wanted == value);
    let named = rule.program.as_ref().is_none_or(|name| {
        let start = program.get(..name.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(name))
    });
    named && is(rule.domain, domain) && is(rule.kind, kind) && is(rule.protocol, protocol)
}

/// Options that new sockets begin with, and their values.
pub(crate) fn sizes() -> &'static [(c_int, c_int)] {
    &config().sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_rdma_cores() {
        let rules = from_file(
            "# comment\niperf3 INET STREAM TCP\n* pf_inet6 * *\nx * sock_dgram IPPROTO_UDP\nbad INET9 * *\nshort *\n",
        );
        assert_eq!(rules.len(), 3);
        let (v4, v6) = (libc::AF_INET, libc::AF_INET6);
        let (stream, dgram) = (libc::SOCK_STREAM, libc::SOCK_DGRAM);
        let (tcp, udp) = (libc::IPPROTO_TCP, libc::IPPROTO_UDP);
        assert!(fits(&rules[0], "iperf3", v4, stream, tcp));
        assert!(fits(&rules[0], "IPERF3-server", v4, stream, tcp));
        assert!(!fits(&rules[0], "iperf", v4, stream, tcp));
        assert!(!fits(&rules[0], "iperf3", v6, stream, tcp));
        assert!(fits(&rules[1], "any", v6, dgram, udp) && !fits(&rules[1], "any", v4, dgram, udp));
        assert!(fits(&rules[2], "x", v4, dgram, udp) && !fits(&rules[2], "x", v4, stream, tcp));
    }

    #[test]
    fn the_variable_names_kinds() {
        let kinds = |text| from_variable(text).iter().map(|r| r.kind).collect::<Vec<_>>();
        assert_eq!(kinds("stream"), [Some(libc::SOCK_STREAM)]);
        assert_eq!(kinds("stream, dgram"), [Some(libc::SOCK_STREAM), Some(libc::SOCK_DGRAM)]);
        assert_eq!(kinds("nonsense"), []);
    }
}
