//! The rows of a page.

use crate::words::{Part, Reader, Writer, row};

/// Writes a GID as the address that it stands for. No reader of JSON keeps all digits of a number of 128 bits.
#[cfg(feature = "serde")]
fn as_address<S: serde::Serializer>(gid: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&crate::address(*gid))
}

row! {
    /// A process.
    Process {
        /// Its number in its own PID namespace.
        pid: u32,
        /// Its slot of the host: the top byte of its queue pair numbers.
        slot: u8,
        /// Its UDP port.
        udp_port: u16,
        /// How many objects it has.
        objects: Objects,
        /// Queue pairs and completion queues that the page has no room for.
        left_out: u32,
    }

    /// How many objects a process has.
    Objects {
        /// Queue pairs; raw packet ones count as well, though they have no row.
        queue_pairs: u32,
        /// Completion queues.
        completion_queues: u32,
        /// Shared receive queues.
        shared_receive_queues: u32,
        /// Protection domains.
        protection_domains: u32,
        /// Memory regions.
        regions: u32,
        /// Bytes of these.
        region_bytes: u64,
        /// Memory windows.
        windows: u32,
        /// Address handles.
        address_handles: u32,
    }

    /// A queue pair.
    QueuePair {
        /// Its number.
        number: u32,
        /// Its transport type, as `enum ibv_qp_type`.
        kind: u8,
        /// Its state, as `enum ibv_qp_state`.
        state: u8,
        /// The way of its packets.
        way: Way,
        /// Its protection domain.
        protection_domain: u32,
        /// Its send queue.
        sends: Sends,
        /// Its receive queue.
        receives: Receives,
        /// The other end.
        peer: Peer,
        /// Its traffic.
        traffic: Traffic,
        /// Its wait.
        waiting: Waiting,
        /// Asynchronous events of it that were read and not acknowledged.
        unacknowledged: u32,
        /// The thread that locks it did not give it back in time: only number, type and port are known.
        busy: bool,
        /// The place of its port among those of the process, from 0.
        port: u32,
        /// Its attributes, as `ibv_query_qp` tells them.
        attributes: Attributes,
    }

    /// Attributes of a queue pair, with the names and codes of `struct ibv_qp_attr`.
    Attributes {
        /// `timeout`.
        timeout: u8,
        /// `retry_cnt`.
        retry_cnt: u8,
        /// `rnr_retry`.
        rnr_retry: u8,
        /// `min_rnr_timer`.
        min_rnr_timer: u8,
        /// `max_rd_atomic`.
        max_rd_atomic: u8,
        /// `max_dest_rd_atomic`.
        max_dest_rd_atomic: u8,
        /// `qp_access_flags`, as `enum ibv_access_flags`.
        qp_access_flags: u32,
        /// `ah_attr.grh.sgid_index`.
        sgid_index: u8,
        /// The P_Key that `pkey_index` names.
        pkey: u16,
        /// `qkey`; 0 unless the type is UD.
        qkey: u32,
    }

    /// A send queue.
    Sends {
        /// Requests that it holds.
        depth: u32,
        /// Slots that are taken. A slot is free again when a completion that covers it was polled.
        taken: u32,
        /// Requests that are not complete.
        outstanding: u32,
        /// Requests of these that have not left.
        unsent: u32,
        /// The completion queue, or 0.
        completion_queue: u32,
    }

    /// A receive queue.
    Receives {
        /// Receives that it holds; 0 with a shared one.
        depth: u32,
        /// Receives that wait, of a shared queue all of its.
        fill: u32,
        /// They come from a shared receive queue.
        shared: bool,
        /// The completion queue, or 0.
        completion_queue: u32,
        /// Receives that were posted since the last reset; 0 with a shared one.
        posted: u64,
        /// Receives of these that are complete.
        completed: u64,
    }

    /// The other end of a connection; zeros on UD, and before there is one.
    Peer {
        /// The number of its queue pair.
        number: u32,
        /// Its address as a GID, the highest byte first.
        #[cfg_attr(feature = "serde", serde(serialize_with = "as_address"))]
        gid: u128,
        /// The address of this end.
        #[cfg_attr(feature = "serde", serde(serialize_with = "as_address"))]
        source: u128,
        /// The path MTU in bytes.
        mtu: u32,
        /// Packet sequence numbers.
        psns: Psns,
    }

    /// Packet sequence numbers.
    Psns {
        /// The oldest packet without an answer.
        unanswered: u32,
        /// The next new packet.
        next: u32,
        /// The next packet of the peer.
        expected: u32,
    }

    /// The traffic of a queue pair since its last reset.
    Traffic {
        /// Requests that succeeded.
        sent: u64,
        /// Bytes of these.
        sent_bytes: u64,
        /// Requests of the peer that were executed.
        received: u64,
        /// Bytes of these.
        received_bytes: u64,
        /// Timeouts and NAKs after which packets were sent again.
        retries: u32,
        /// RNR NAKs of the peer.
        rnr_naks: u32,
    }

    /// The wait of a queue pair.
    Waiting {
        /// That.
        what: Wait,
        /// Since when is known.
        known: bool,
        /// For how long, in nanoseconds.
        ns: u64,
        /// The cause of a failure, as in `anyverbs explain`; or 0.
        cause: u16,
    }

    /// A queue pair is attached to a multicast group.
    Group {
        /// The number of the queue pair.
        queue_pair: u32,
        /// The group's GID, the highest byte first.
        #[cfg_attr(feature = "serde", serde(serialize_with = "as_address"))]
        gid: u128,
    }

    /// A completion queue.
    CompletionQueue {
        /// Its number in its process.
        number: u32,
        /// Completions that it holds.
        depth: u32,
        /// Completions that wait.
        fill: u32,
        /// A completion was lost.
        overrun: bool,
        /// It has a completion channel.
        has_channel: bool,
        /// For how long completions have waited that nobody polled, in nanoseconds.
        unpolled_ns: u64,
        /// Events that were read and not acknowledged.
        unacknowledged: u32,
        /// The place of the first port of its device among the ports of the process, from 0.
        device: u32,
    }
}

impl Attributes {
    /// The flags of `qp_access_flags` by their names in C, or `none`.
    #[must_use]
    pub fn rights(&self) -> String {
        let names = ["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ", "REMOTE_ATOMIC"];
        let has = |(bit, _): &(usize, &str)| self.qp_access_flags & 1 << bit != 0;
        let given = names.into_iter().enumerate().filter(has).map(|(_, name)| name);
        let given: Vec<_> = given.collect();
        if given.is_empty() { "none".to_owned() } else { given.join(", ") }
    }
}

/// A counter of the port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Counter {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: u64,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
        #[repr(u8)]
        pub enum $name {
            #[default]
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// All, in the order of their codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// For people.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl Part for $name {
            const WORDS: usize = 1;

            fn put(&self, to: &mut Writer<'_>) {
                to.word(*self as u64);
            }

            fn take(from: &mut Reader<'_>) -> Option<Self> {
                Self::ALL.get(usize::try_from(from.word()?).ok()?).copied()
            }
        }
    )*};
}

codes! {
    /// The way of packets.
    Way {
        /// None yet.
        None = "-",
        /// To a queue pair of the same process.
        Process = "process",
        /// To another process of the host, through shared memory.
        Shm = "shm",
        /// The same, with lanes for short SENDs.
        Lanes = "lanes",
        /// By UDP.
        Udp = "udp",
    }

    /// The kinds of waits of a queue pair.
    Wait {
        /// For nothing.
        Nothing = "-",
        /// For its program to connect it.
        State = "to be connected",
        /// It is in an error state.
        Failed = "failed",
        /// For an answer.
        Answer = "an ACK",
        /// For the program of the peer to post a receive.
        PeerReceive = "the peer to post a receive",
        /// For its own program to post a receive.
        OwnReceive = "a receive to be posted",
        /// For a rate limit.
        Rate = "its rate limit",
        /// For earlier READs and atomics.
        Fence = "READs before a fence",
        /// For its program, in SQD.
        Drained = "its program to leave SQD",
        /// For the link to take more.
        Room = "room on the link",
        /// For the receiver's credit (UC and UD).
        Credit = "the receiver's credit",
        /// For nothing that can come: the process at the other end has ended.
        PeerEnded = "a peer that has ended",
        /// For its program to poll the completion queue of its sends.
        PollSends = "its send CQ to be polled",
        /// For its program to poll the completion queue of its receives.
        PollReceives = "its receive CQ to be polled",
        /// For a rule of a script of faults to let something go.
        Rule = "a rule of a script of faults",
        /// For the peer, which found no receive, to send again: one is there now.
        PeerRepeat = "the peer to send again",
        /// For nothing that can come: the send queue is full of requests that make no completion.
        FullSends = "its send queue, which is full for good",
        /// For nothing that can come: the peer has given up its message, for which there was no receive.
        PeerGaveUp = "a peer that has given up",
    }
}
