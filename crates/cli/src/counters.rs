//! The counters of a port under the names that tools read: those of the InfiniBand architecture, of mlx5 and of rxe.
//!
//! A file is there if the device counts it, or if it is truly zero for this device. What the device does not tell apart, such as multicast
//! packets, has no file.

use std::collections::BTreeMap;

/// Counters of the device, by name.
pub(crate) type Counters = BTreeMap<&'static str, u64>;

/// A file of a directory, and its value.
pub(crate) type Files = Vec<(&'static str, u64)>;

/// Errors that a device without cables, symbols and virtual lanes never has.
const ALWAYS_ZERO: [&str; 8] = [
    "symbol_error",
    "link_error_recovery",
    "local_link_integrity_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
];

/// Other names of a counter: of rxe, then of mlx5.
const ALIASES: [(&str, &str); 3] = [
    ("out_of_seq_request", "out_of_sequence"),
    ("rcvd_seq_err", "packet_seq_err"),
    ("rnr_nak_retry_err", "rcvd_rnr_err"),
];

/// The files of `counters`.
pub(crate) fn port(counters: &Counters) -> Files {
    let of = |name: &str| counters.get(name).copied().unwrap_or(0);
    let mut files = vec![
        // In words of four bytes.
        ("port_xmit_data", of("sent_bytes") / 4),
        ("port_rcv_data", of("rcvd_bytes") / 4),
        ("port_xmit_packets", of("sent_pkts")),
        ("port_rcv_packets", of("rcvd_pkts")),
        ("port_xmit_discards", of("send_err")),
        ("port_rcv_errors", of("drop_malformed").saturating_add(of("rx_icrc_encapsulated"))),
        ("port_rcv_constraint_errors", of("drop_pkey")),
    ];
    files.extend(ALWAYS_ZERO.map(|name| (name, 0)));
    files
}

/// The files of `hw_counters`.
pub(crate) fn hardware(counters: &Counters) -> Files {
    let of = |name: &str| counters.get(name).copied().unwrap_or(0);
    let mut files: Files = counters.iter().map(|(name, value)| (*name, *value)).collect();
    files.extend(ALIASES.map(|(alias, name)| (alias, of(name))));
    let retries = ["packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"].map(of);
    files.push(("completer_retry_err", retries.into_iter().fold(0, u64::saturating_add)));
    files.sort_unstable();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other processes write the counters.
    #[test]
    fn sums_have_an_end() {
        let all: Counters =
            anyverbs::Counter::ALL.iter().map(|counter| (counter.name(), u64::MAX)).collect();
        for (files, name) in
            [(port(&all), "port_rcv_errors"), (hardware(&all), "completer_retry_err")]
        {
            assert!(files.contains(&(name, u64::MAX)));
        }
    }

    #[test]
    fn tools_find_their_names() {
        let all = anyverbs::Counter::ALL.iter().zip(1..).map(|(counter, n)| (counter.name(), n));
        let counters: Counters = all.collect();
        let (port, hardware) = (port(&counters), hardware(&counters));
        for name in ["port_xmit_data", "port_rcv_data", "port_xmit_discards", "symbol_error"] {
            assert!(port.iter().any(|(file, _)| *file == name), "{name}");
        }
        for name in [
            "sent_pkts",
            "rcvd_pkts",
            "duplicate_request",
            "out_of_seq_request",
            "rcvd_rnr_err",
            "send_rnr_err",
            "rcvd_seq_err",
            "retry_exceeded_err",
            "retry_rnr_exceeded_err",
            "completer_retry_err",
            "send_err",
            "out_of_sequence",
            "packet_seq_err",
            "rnr_nak_retry_err",
            "local_ack_timeout_err",
            "np_cnp_sent",
            "rp_cnp_handled",
        ] {
            assert!(hardware.iter().any(|(file, value)| *file == name && *value > 0), "{name}");
        }
        for files in [port, hardware] {
            let mut names: Vec<_> = files.iter().map(|(name, _)| name).collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "each name once");
        }
    }
}
