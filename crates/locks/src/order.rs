//! The order of the locks.

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The order in which a thread takes locks: from the top to the bottom. It leaves out those that it does not need.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Rank {
            $($(#[$doc])* $name,)*
        }

        impl Rank {
            /// In their order.
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }

        /// The ranks as types.
        pub mod rank {
            $(
                $(#[$doc])*
                #[derive(Clone, Copy, Debug)]
                pub struct $name;

                impl super::Ranked for $name {
                    const RANK: super::Rank = super::Rank::$name;
                }
            )*
        }
    };
}

/// A rank as a type.
pub trait Ranked {
    /// Its place in the order.
    const RANK: Rank;
}

ranks! {
    // Setting up and taking down.
    /// What a script of faults lets happen at a time: one thread does it, and others skip it (`transport`).
    FaultScript,
    /// A target of another process is opened or closed; its process is asked meanwhile (`xrc`).
    XrcOpening,
    /// The connections that one thread reads and serves, of processes that share XRC domains (`net`).
    MessagesIn,
    /// The domains of this process that have a file.
    XrcDomains,
    /// The start of the messages between processes that share domains.
    XrcStarting,
    /// Questions to other processes that wait for their answers.
    XrcQuestions,
    /// When records of ended processes are looked for again (`cm`).
    RecordsDue,
    /// Which other processes live, and have ended (`cm`).
    Neighbours,
    /// The Ethernet sockets are opened (`raw`).
    RawOpening,
    /// The memberships of multicast groups, as programs change them.
    Groups,
    /// The groups that the sockets have joined.
    Memberships,
    /// Which process of the host gets which datagram of the port.
    Steering,
    /// A region, its pages and its keys.
    MemoryRegion,

    // Receiving.
    /// Packets within the process are delivered, by one thread.
    InprocDrain,
    /// Queue pairs that waited for room in the queue within the process, while they are woken.
    InprocDrainWaiting,
    /// Datagrams of groups are handed on to other processes.
    HandingOn,
    /// The Ethernet sockets are read; other threads skip it.
    FrameBuffers,
    /// The receive path: one thread reads the sockets and rings; others skip it.
    Receive,

    // The connection manager.
    /// Datagrams leave QP1 in their order.
    CmSend,
    /// The machine of all ids and connections.
    CmMachine,
    /// An id.
    CmId,
    /// The events of an id that wait to be read.
    CmIdEvents,
    /// The order of the events of a channel's ids.
    EventChannel,
    /// Requests to a listener that the program has not taken up.
    ListenerRequests,
    /// Listeners of this process that have ended.
    Lingering,
    /// DREQs that wait until earlier messages are received.
    WaitingDisconnects,
    /// Requests that wait for a listener.
    UnservedRequests,
    /// Services that this process has left.
    ServicesLeft,
    /// A service that this process holds.
    ServiceHeld,
    /// The sections of the host's journal that this process has locked.
    Journal,

    // Raw packets.
    /// The sends of a raw packet queue pair.
    RawQueuePair,
    /// The rules that say which receive queue gets a frame.
    FlowRules,
    /// A rule, as its object has it.
    Flow,
    /// The action that a rule takes on a frame.
    FlowAction,
    /// The readers of the Ethernet sockets.
    FanoutMembers,
    /// The rules and queue pairs that a set of counters counts.
    CounterPoints,
    /// A work queue.
    WorkQueue,
    /// The receives of a raw packet queue pair or a work queue.
    RawReceiveQueue,

    // Queue pairs and queues.
    /// The table of queue pairs, for a look-up.
    QueuePairs,
    /// A queue pair: requester, responder and link. No thread waits for a second one.
    QueuePair,
    /// The rules of a script of faults.
    Faults,
    /// The queue pairs of each group, for a look-up.
    GroupMembers,
    /// Bindings of memory windows. An access in progress is waited for under it.
    KeyBindings,
    /// Keys that may be given out.
    FreeKeys,
    /// The sending side of a ring, from the first packet of a call until the call ends.
    RingWriter,
    /// The table of SRQs, for a look-up. A request that names one may come behind a notification of congestion, which is in the ring by then.
    SharedReceiveQueues,
    /// An SRQ. An XRC receive completes under it.
    SharedReceiveQueue,
    /// A completion queue.
    CompletionQueue,
    /// The handles of a queue pair, which get its asynchronous events.
    QueuePairHandles,
    /// Completion queues whose events are put off, and raw queue pairs whose frames are.
    ModeratedQueues,

    // Links.
    /// The processes at the other ends of the rings.
    Peers,
    /// Queue pairs that wait for room in a ring.
    RingWaiting,
    /// Regions of a peer that are mapped here.
    MappedRegions,
    /// The part of a ring's traffic that the counters have.
    TrafficCounted,
    /// The lanes to another process, and the counts of lanes.
    Lanes,
    /// The bells to another process (`net`).
    Bells,
    /// The part of the copies without a message that the counters have.
    CopiesCounted,
    /// The connections of the same-host link.
    ShmEndpoint,
    /// News for the poller of the rings.
    ShmNews,
    /// The processes that see what this one publishes.
    AttachedPages,
    /// Copies of processes that are no longer attached.
    PastCopies,
    /// Packets that wait within the process.
    InprocQueue,
    /// Queue pairs that wait for room there.
    InprocWaiting,
    /// The paths by UDP, for a look-up.
    Paths,
    /// Queue pairs that wait for a place on a path.
    PathQueue,
    /// Queue pairs that got a place on their path and have to be called.
    Admitted,
    /// Credit of a path.
    PathPace,
    /// Batches of datagrams that may be used again.
    BatchPool,
    /// The connected sending sockets, for a look-up.
    ConnectedSockets,
    /// The IPv4 IDs of a connected sending socket.
    Ipv4Ids,

    /// The states of ports, as the last events of them told.
    PortsTold,

    // Leaves.
    /// The regions whose memory a script of faults lets vanish.
    VanishingRegions,
    /// Memory keys that have ended.
    EndedKeys,
    /// The completion queues, for those who look.
    CompletionQueues,
    /// Lines of the log that a thread has taken to write.
    FailureLines,
    /// Completion queues that have overrun, and lines for the log.
    Aftermath,
    /// Queue pairs that owe an ACK.
    OwedAcks,
    /// Queue pairs for which a thread is sending an ACK.
    AcksBegun,
    /// Deadlines of queue pairs.
    Timers,
    /// The events of a completion channel or a context.
    Events,
    /// Events that were read and not acknowledged.
    UnacknowledgedEvents,
    /// Calls that wait until events are acknowledged.
    WaitingCalls,
    /// The GID table.
    Gids,
    /// The addresses of the host.
    HostGids,
    /// Contexts that hear of events of the port.
    PortListeners,
    /// The protection domain that a parent domain stands for.
    ParentDomain,
    /// The objects that a completion queue holds until it is destroyed.
    CompletionQueueHold,
    /// The objects that any other object holds until it is destroyed.
    ObjectHold,
    /// Numbers of protection domains. A domain may end with the last object that holds it.
    ProtectionDomainNumbers,
    /// Connections to processes that share XRC domains.
    MessagesOut,
    /// Datagrams for other processes that wait for room.
    ForwardKept,
    /// Connections to processes that get datagrams handed on.
    ForwardConnections,
    /// Connections of other processes to this one's slot.
    HostConnections,
}
