//! Everything that the program has made or posted, and that has not ended.

mod datagrams;
mod dead;
mod ends;
mod failed;
mod outstanding;
mod turns;
mod work;

use crate::catalogue::Check;
use crate::facts::{
    Activity, Completion, DropsOf, Elements, Kind, Piece, QueuePair, Refusal, Region, Work,
};
use crate::map::Map;
use crate::memory::{self, Memory, Read};
use crate::report::{Finding, Reporter};
use crate::stack::Stack;
use dead::Dead;
use outstanding::{Outstanding, Users};

#[derive(Debug)]
struct Object {
    kind: Kind,
    /// The number that the device gave it.
    number: Option<u32>,
    stack: Stack,
    /// The address of its context, or 0.
    context: usize,
    /// Where that was closed.
    closed: Option<Stack>,
    /// The addresses of the objects that it uses.
    uses: Vec<usize>,
    /// The multicast groups that it is attached to.
    groups: Vec<Group>,
    /// Events about it that the program read and did not acknowledge.
    unacknowledged: Vec<Unacknowledged>,
    /// The number of the call that ends it, if the program is in one.
    ending: Option<u64>,
    /// The library made it for itself.
    is_own: bool,
}

impl Object {
    /// See [`Kind::at`].
    fn at(&self, address: usize) -> String {
        self.kind.at(address, self.number)
    }
}

/// A multicast group that a queue pair is attached to.
#[derive(Debug)]
struct Group {
    gid: String,
    /// Where it was attached, or its identifier joined.
    stack: Stack,
    /// The address of the identifier that has joined the group for it; 0 if the program attached it.
    id: usize,
}

/// Events of one type, of one object.
#[derive(Debug)]
struct Unacknowledged {
    code: u32,
    name: &'static str,
    count: u32,
    /// Where the last one was read.
    stack: Stack,
}

/// A completion queue.
#[derive(Debug, Default)]
struct CompletionQueue {
    /// The completions that it holds; `None` if it may lose the oldest.
    capacity: Option<u32>,
    /// Completions that queue pairs can add before the program polls.
    expected: usize,
    /// It was reported, or suppressed, that it is too small.
    is_too_small: bool,
    /// It was reported, or suppressed, that it has lost completions.
    is_overrun: bool,
    /// The thread that uses it, if it was made for one thread: in a call, or from `ibv_start_poll` to `ibv_end_poll`.
    turn: Option<Turn>,
    /// It was reported that a second thread uses it.
    is_shared: bool,
}

/// A thread's turn at a completion queue.
#[derive(Clone, Debug)]
struct Turn {
    thread: libc::pthread_t,
    call: &'static str,
    stack: Stack,
}

/// The queues of a queue pair, or of an SRQ.
#[derive(Debug, Default)]
struct Queues {
    qp: Option<QueuePair>,
    /// The number of the queue pair that it is connected to, or 0.
    peer: u32,
    sends: Outstanding,
    receives: Outstanding,
    /// Its completions do not say that they are its own, or the program counts them instead of polling. Nothing is known of what is
    /// outstanding.
    is_unwatched: bool,
    /// The send queue is full for good, and this was reported.
    is_stuck: bool,
    /// Checks by which dropped datagrams, or a difference between the two ends, were reported.
    dropped: Vec<Check>,
    /// The program read that the queue pair takes no more receives of its SRQ.
    saw_last_wqe: bool,
    /// Where the queue pair is ended without this.
    abandons: Option<Stack>,
    /// The `wr_id` of receives of its SRQ whose completions go with it.
    takes_along: Vec<u64>,
    /// For an SRQ: a queue pair that was ended so.
    abandoned_by: Option<Abandoned>,
}

/// A queue pair that may have taken a receive of an SRQ with it.
#[derive(Debug)]
struct Abandoned {
    number: u32,
    made: Stack,
    ended: Stack,
}

/// See the [crate].
#[derive(Debug)]
pub struct Ledger {
    reporter: Reporter,
    memory: Memory,
    drops_of: DropsOf,
    /// By the address that the program knows.
    objects: Map<usize, Object>,
    regions: Regions,
    queues: Map<usize, Queues>,
    users: Users,
    numbers: Map<u32, usize>,
    cqs: Map<usize, CompletionQueue>,
    pinned: Pinned,
    dead: Dead,
    /// The calls that end objects are numbered.
    endings: u64,
    /// An identifier has joined a group.
    has_joins: bool,
    has_found_in_child: bool,
    /// The fields of failed completions that the program read, each once.
    undefined: Vec<&'static str>,
    has_told_of_poison: bool,
}

/// Memory regions.
#[derive(Debug, Default)]
struct Regions {
    /// By local key, with the address that the program knows.
    by_key: Map<u32, (usize, Region)>,
    /// Local keys by that address.
    keys: Map<usize, u32>,
    /// Where regions were last changed.
    changed: Map<usize, Stack>,
}

impl Regions {
    fn add(&mut self, address: usize, region: Region) {
        self.by_key.insert(region.lkey, (address, region));
        self.keys.insert(address, region.lkey);
    }

    fn remove(&mut self, address: usize) -> Option<Region> {
        self.changed.remove(&address);
        let lkey = self.keys.remove(&address)?;
        self.by_key.remove(&lkey).map(|(_, region)| region)
    }

    fn at(&mut self, address: usize) -> Option<&mut Region> {
        let lkey = self.keys.get(&address)?;
        self.by_key.get_mut(lkey).map(|(_, region)| region)
    }

    /// The region of a local key, and its address.
    fn of_key(&self, lkey: u32) -> Option<(usize, &Region)> {
        self.by_key.get(&lkey).map(|(address, region)| (*address, region))
    }

    /// Where an element lies in memory; `None` if it is not within its region.
    fn place(&self, piece: &Piece) -> Option<u64> {
        let (_, region) = self.of_key(piece.lkey)?;
        let offset = piece.addr.checked_sub(region.iova)?;
        let fits = offset.checked_add(piece.len.into())? <= region.len;
        fits.then(|| region.addr.wrapping_add(offset))
    }

    /// Whether a request makes the device write memory that another one names.
    fn fills(&self, writer: &Work, other: &Work) -> bool {
        if writer.elements != Elements::Written {
            return false;
        }
        let bytes = |piece: &Piece| {
            let from = self.place(piece)?;
            Some(from..from.saturating_add(piece.len.into()))
        };
        writer.pieces.iter().filter_map(bytes).any(|a| {
            other.pieces.iter().filter_map(bytes).any(|b| a.start.max(b.start) < a.end.min(b.end))
        })
    }

    /// The checksum of elements; the inner one is `None` if a part is not mapped. `None` if one of them is not within its region.
    fn checksum(&self, pieces: &[Piece], memory: &mut Memory) -> Option<Option<u32>> {
        let mut sum = memory.sum();
        for piece in pieces.iter().filter(|piece| piece.len > 0) {
            sum.add(self.place(piece)?, piece.len);
        }
        Some(sum.finish())
    }
}

/// Registered memory that a device would pin.
#[derive(Debug, Default)]
struct Pinned {
    bytes: u64,
    /// It was reported that it exceeds the limit.
    is_reported: bool,
}

impl Ledger {
    pub(crate) fn new(reporter: Reporter, read: Read, drops_of: DropsOf) -> Self {
        Self {
            reporter,
            memory: Memory::new(read),
            drops_of,
            objects: Map::default(),
            regions: Regions::default(),
            queues: Map::default(),
            users: Users::default(),
            numbers: Map::default(),
            cqs: Map::default(),
            pinned: Pinned::default(),
            dead: Dead::default(),
            endings: 0,
            has_joins: false,
            has_found_in_child: false,
            undefined: Vec::new(),
            has_told_of_poison: false,
        }
    }

    pub(crate) fn has_findings(&self) -> bool {
        self.reporter.findings > 0
    }

    /// The same, of what this forked child did.
    pub(crate) fn has_findings_in_child(&self) -> bool {
        self.has_found_in_child && self.has_findings()
    }

    /// This process is a forked child. Its ledger begins anew, unless its parent has objects.
    pub(crate) fn begins_anew(&mut self) -> bool {
        if !self.objects.is_empty() {
            return false;
        }
        let (reporter, read, drops_of) = (self.reporter.anew(), self.memory.read, self.drops_of);
        *self = Self::new(reporter, read, drops_of);
        true
    }

    /// A forked child posts to a queue, which may be its parent's.
    pub(crate) fn posts_in_child(&mut self, queue: usize) {
        self.uses_in_child(queue, "posts to", "the call fails");
    }

    /// A forked child ends an object, which may be its parent's. The descriptors that it closes are its own.
    pub(crate) fn ends_in_child(&mut self, address: usize) {
        let is_own = |object: &Object| object.kind.is_of_process();
        if !self.objects.get(&address).is_some_and(is_own) {
            self.uses_in_child(address, "ends", "nothing happens here");
        }
    }

    /// The ledger does not have what the child made itself.
    fn uses_in_child(&mut self, address: usize, does: &str, then: &str) {
        let Some(object) = self.objects.get(&address).filter(|_| !self.has_found_in_child) else {
            return;
        };
        let (name, place) = (object.kind.name(), object.at(address));
        let what = format!("a forked child {does} the {place}, which is its parent's; {then}");
        let made = self.origin(address, &format!("The {name} was made here, by the parent"));
        self.has_found_in_child = true;
        self.report(Check::ForkedChild, what, vec![here(Stack::here()), made]);
    }

    /// The program made an object. It belongs to the context of this address; 0 is none.
    pub fn made(&mut self, address: usize, kind: Kind, context: usize) {
        self.dead.remove(address);
        let object = Object {
            kind,
            number: None,
            stack: Stack::here(),
            context,
            closed: None,
            uses: Vec::new(),
            groups: Vec::new(),
            unacknowledged: Vec::new(),
            ending: None,
            is_own: false,
        };
        self.objects.insert(address, object);
    }

    /// The device gave the object this number, which the log prints.
    pub fn numbered(&mut self, address: usize, number: u32) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.number = Some(number);
        }
    }

    /// The library made this object for itself, and keeps it until the process ends.
    pub fn is_own(&mut self, address: usize) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.is_own = true;
        }
    }

    /// The objects that an object uses, which cannot end before it.
    pub fn made_of(&mut self, address: usize, uses: &[usize]) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.uses = uses.to_vec();
        }
    }

    /// The queue pair is attached to a multicast group. To be attached again changes nothing.
    pub fn attached(&mut self, address: usize, gid: String) {
        let Some(object) = self.objects.get_mut(&address) else { return };
        if object.groups.iter().all(|group| group.gid != gid || group.id != 0) {
            object.groups.push(Group { gid, stack: Stack::here(), id: 0 });
        }
    }

    /// An identifier has joined a multicast group for its queue pair. It may do so more than once.
    pub fn joined(&mut self, address: usize, id: usize, gid: String) {
        let Some(object) = self.objects.get_mut(&address) else { return };
        object.groups.push(Group { gid, stack: Stack::here(), id });
        self.has_joins = true;
    }

    /// An identifier has left a group that it had joined for its queue pair: once.
    pub fn left(&mut self, address: usize, id: usize, gid: &str) {
        let Some(object) = self.objects.get_mut(&address) else { return };
        let is_it = |group: &Group| group.id == id && group.gid == gid;
        if let Some(at) = object.groups.iter().rposition(is_it) {
            object.groups.remove(at);
        }
    }

    /// The queue pair is detached from a multicast group.
    pub fn detached(&mut self, address: usize, gid: &str) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.groups.retain(|group| group.gid != gid || group.id != 0);
        }
    }

    /// Facts about a queue pair that was made.
    pub fn made_qp(&mut self, address: usize, qp: QueuePair) {
        self.numbers.insert(qp.number, address);
        self.numbered(address, qp.number);
        self.queues.entry(address).or_default().qp = Some(qp);
    }

    /// A completion queue holds this many completions from now on; `None` if it may lose the oldest.
    pub fn sized_cq(&mut self, address: usize, capacity: Option<u32>) {
        self.cqs.entry(address).or_default().capacity = capacity;
    }

    /// A call of a row of calls for an object has no place where it stands: this is wrong.
    pub fn is_out_of_order(&mut self, address: usize, wrong: &str) {
        let Some(object) = self.objects.get(&address) else { return };
        let name = object.kind.name();
        let what = format!("{wrong} (the {})", object.at(address));
        let made = self.origin(address, &format!("The {name} was made here"));
        self.report(Check::OutOfOrder, what, vec![here(Stack::here()), made]);
    }

    /// The device refuses a call for what its persona lacks.
    pub fn refused_by_persona(&mut self, refusal: &Refusal) {
        let Refusal { call, lacks, why } = refusal;
        let what = format!("{call} is refused: {why}");
        // A program may ask for several of them in one place.
        let about = format!("{call} {lacks}");
        let stacks = vec![here(Stack::here())];
        self.reporter.report(&Finding { check: Check::Persona, about, what, stacks });
    }

    /// Nothing is known of what is outstanding in a queue: an SRQ of XRC or one that matches tags, whose completions do not say that
    /// they are its own, or a queue pair with completion counters.
    pub fn unwatch(&mut self, address: usize) {
        self.queues.entry(address).or_default().is_unwatched = true;
    }

    /// Facts about a memory region that was made.
    pub fn made_region(&mut self, address: usize, region: Region) {
        self.regions.add(address, region);
        self.pins(region.pinned(), &region);
    }

    /// A region pins more memory. Hardware refuses what exceeds the limit of the process.
    fn pins(&mut self, bytes: u64, region: &Region) {
        self.pinned.bytes += bytes;
        if bytes == 0 || self.pinned.is_reported {
            return;
        }
        let Some(limit) = memory::lock_limit_below(self.pinned.bytes) else { return };
        self.pinned.is_reported = true;
        let what = format!(
            "with the region at {:#x} ({} bytes) the program has registered {} bytes, and RLIMIT_MEMLOCK is {limit}",
            region.addr, region.len, self.pinned.bytes
        );
        self.report(Check::Memlock, what, vec![("It was registered here".into(), Stack::here())]);
    }

    fn unpins(&mut self, bytes: u64) {
        self.pinned.bytes = self.pinned.bytes.saturating_sub(bytes);
    }

    /// The program changed a memory region. The functions are as for [`ends`](Self::ends).
    pub fn changed_region(
        &mut self,
        address: usize,
        change: impl FnOnce(&mut Region),
        activity: impl Fn(usize) -> Activity,
        waiting: impl Fn(usize) -> Vec<Completion>,
    ) {
        let works = |qp| activity(qp) == Activity::Works;
        self.check_region(address, "changed", works, waiting);
        self.regions.changed.insert(address, Stack::here());
        let Some(region) = self.regions.at(address) else { return };
        let before = region.pinned();
        change(region);
        let region = *region;
        self.unpins(before);
        self.pins(region.pinned(), &region);
    }

    /// The queue pair is connected to another one, of this number.
    pub fn connected(&mut self, address: usize, to: u32) {
        self.queues.entry(address).or_default().peer = to;
    }

    /// The queue pair forgets what was posted to it.
    pub fn reset(&mut self, address: usize) {
        let Some(queues) = self.queues.get_mut(&address) else { return };
        queues.saw_last_wqe = false;
        let (sends, receives) = (queues.sends.signaled(), queues.receives.len());
        queues.sends.clear(&mut self.users);
        queues.receives.clear(&mut self.users);
        if let Some(qp) = queues.qp {
            let along = std::mem::take(&mut queues.takes_along);
            if let Some(srq) = self.queues.get_mut(&qp.srq) {
                for wr_id in along {
                    let n = srq.receives.position(|posted| posted.work.wr_id == wr_id);
                    n.and_then(|n| srq.receives.take(n, &mut self.users));
                }
            }
            self.expects_less(qp.send_cq, sends);
            self.expects_less(qp.recv_cq, receives);
        }
    }

    fn expects_less(&mut self, cq: usize, n: usize) {
        if let Some(cq) = self.cqs.get_mut(&cq) {
            cq.expected = cq.expected.saturating_sub(n);
        }
    }

    /// An object of this kind at an address, in a report.
    fn place(&self, kind: Kind, address: usize) -> String {
        kind.at(address, self.objects.get(&address).and_then(|object| object.number))
    }

    fn origin(&self, address: usize, title: &str) -> (String, Stack) {
        let stack = self.objects.get(&address).map(|object| object.stack);
        (title.to_owned(), stack.unwrap_or_else(Stack::here))
    }

    /// Where a region was registered, and where it was last changed.
    fn origins_of_region(&self, address: usize) -> Vec<(String, Stack)> {
        let made = self.origin(address, "The region was registered here");
        let changed = self.regions.changed.get(&address);
        let changed = changed.map(|stack| ("The region was last changed here".into(), *stack));
        changed.into_iter().chain([made]).collect()
    }

    fn report(&mut self, check: Check, what: String, stacks: Vec<(String, Stack)>) {
        self.reporter.report(&Finding { check, about: String::new(), what, stacks });
    }
}

fn here(stack: Stack) -> (String, Stack) {
    ("It happened here".to_owned(), stack)
}
