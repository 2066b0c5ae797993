//! Counters: names as in `/sys/class/infiniband/*/ports/*/{counters,hw_counters}` of mlx5 and rxe.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// One counter of a port.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(usize)]
        pub enum Counter { $($(#[$doc])* $variant,)* }

        impl Counter {
            /// All, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// A number of all names in their order, for those who add up counters by their places. Never 0.
            pub const DIGEST: u64 = digest(&[$($name,)*]);

            /// File name in the `hw_counters` directory.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

counters! {
    /// Packets sent.
    SentPkts = "sent_pkts",
    /// Packets received and accepted by the parser.
    RcvdPkts = "rcvd_pkts",
    /// Packets sent through shared memory; [`SentPkts`](Self::SentPkts) counts them as well.
    ShmSentPkts = "shm_sent_pkts",
    /// Those of them that left by a lane.
    ShmLanePkts = "shm_lane_pkts",
    /// Packets received through shared memory; [`RcvdPkts`](Self::RcvdPkts) counts them as well.
    ShmRcvdPkts = "shm_rcvd_pkts",
    /// WRITEs that this process made straight into the memory of another; no packets.
    ShmDirectWrites = "shm_direct_writes",
    /// Bytes of these; they are in [`SentBytes`](Self::SentBytes) as well.
    ShmDirectWrittenBytes = "shm_direct_written_bytes",
    /// READs that this process made straight from the memory of another; no packets.
    ShmDirectReads = "shm_direct_reads",
    /// Bytes of these; they are in [`RcvdBytes`](Self::RcvdBytes) as well.
    ShmDirectReadBytes = "shm_direct_read_bytes",
    /// Payload and header bytes sent.
    SentBytes = "sent_bytes",
    /// Payload and header bytes received.
    RcvdBytes = "rcvd_bytes",
    /// Duplicate requests.
    DuplicateRequest = "duplicate_request",
    /// Requests ahead of the expected PSN.
    OutOfSequence = "out_of_sequence",
    /// RNR NAKs received.
    RnrNakReceived = "rcvd_rnr_err",
    /// RNR NAKs sent.
    RnrNakSent = "send_rnr_err",
    /// PSN sequence NAKs received.
    PacketSeqErr = "packet_seq_err",
    /// Responses that showed an earlier one lost.
    ImpliedNakSeqErr = "implied_nak_seq_err",
    /// ACK timeouts.
    LocalAckTimeoutErr = "local_ack_timeout_err",
    /// Retries exhausted.
    RetryExceeded = "retry_exceeded_err",
    /// RNR retries exhausted.
    RnrRetryExceeded = "retry_rnr_exceeded_err",
    /// Packets sent again.
    Retransmitted = "roce_retransmitted_pkts",
    /// Remote access errors that this side found.
    RespRemoteAccessErrors = "resp_remote_access_errors",
    /// Requests for an SRQ that the queue pair's XRC domain does not have.
    RespXrcSrqErrors = "resp_xrc_srq_errors",
    /// Remote access errors that peers reported.
    ReqRemoteAccessErrors = "req_remote_access_errors",
    /// Invalid requests that peers reported.
    ReqRemoteInvalidRequest = "req_remote_invalid_request",
    /// Completions of sends in error.
    ReqCqeError = "req_cqe_error",
    /// Completions of receives in error.
    RespCqeError = "resp_cqe_error",
    /// ACK packets sent.
    AcksSent = "sent_acks",
    /// Congestion notifications received.
    CnpHandled = "rp_cnp_handled",
    /// Congestion notifications sent.
    CnpSent = "np_cnp_sent",
    /// Packets received with an ECN mark.
    EcnMarked = "np_ecn_marked_roce_packets",
    /// Dropped: too short, unknown opcode or version, bad pad or length.
    DropMalformed = "drop_malformed",
    /// Dropped: wrong ICRC.
    DropIcrc = "rx_icrc_encapsulated",
    /// Dropped: no such queue pair.
    DropNoQp = "drop_no_qp",
    /// Dropped: the queue pair's state or type does not take it.
    DropQpState = "drop_qp_state",
    /// Dropped: not from the connected peer's address.
    DropForeign = "drop_foreign_address",
    /// Dropped: P_Key mismatch.
    DropPkey = "drop_pkey",
    /// Dropped: Q_Key mismatch.
    DropQkey = "drop_qkey",
    /// Dropped: a UD or UC message found no receive.
    DropNoRecv = "drop_no_recv",
    /// Dropped: a datagram was longer than its receive, or than the port's MTU.
    DropRecvTooShort = "drop_recv_too_short",
    /// Dropped: UC message with a gap in its PSNs.
    DropUcGap = "drop_uc_gap",
    /// Dropped: UC access or length violation.
    DropUcAccess = "drop_uc_access",
    /// Dropped: an acknowledgement that matches nothing outstanding.
    DropStaleAck = "drop_stale_ack",
    /// Dropped: a flow action could not encrypt or decrypt it.
    DropEsp = "drop_esp",
    /// Dropped by the kernel: the socket's buffer was full.
    DropSocketFull = "drop_socket_full",
    /// Datagrams that arrived at another process of this host and were forwarded.
    Forwarded = "forwarded_pkts",
    /// Packets that the kernel would not send.
    SendFailed = "send_err",
    /// Faults that a script asked for, and that happened.
    InjectedFaults = "injected_faults",
}

/// FNV-1a, with a byte between the names that none has.
const fn digest(names: &[&str]) -> u64 {
    let (mut hash, mut n) = (0xcbf2_9ce4_8422_2325, 0);
    while n < names.len() {
        let (bytes, mut at) = (names[n].as_bytes(), 0);
        while at <= bytes.len() {
            let byte = if at < bytes.len() { bytes[at] } else { 0 };
            hash = (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3);
            at += 1;
        }
        n += 1;
    }
    hash | 1
}

/// The counters of one port. Shared by all threads, never reset.
#[derive(Debug)]
pub struct Counters([AtomicU64; Counter::ALL.len()]);

impl Default for Counters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counters {
    /// Adds `n`.
    pub fn add(&self, counter: Counter, n: u64) {
        if n > 0 {
            self.0[counter as usize].fetch_add(n, Ordering::Relaxed);
        }
    }

    /// The value now.
    #[must_use]
    pub fn read(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }
}
