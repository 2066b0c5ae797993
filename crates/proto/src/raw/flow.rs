//! Flow rules: what they may say, and which of them a frame meets (`ibv_create_flow(3)`).
//!
//! One table steers for all processes of a host. Each process has the whole of it as far as it knows it: its own rules with what they
//! lead to, and those of others, which lead nowhere here but may come before its own ([`record`]).

use std::collections::{BTreeMap, HashMap};

use arrayvec::ArrayVec;
use thiserror::Error;

use super::esp::{Direction, EspAttr, Offload};
use super::frame::{Frame, MplsOver};
use super::spec::{Filter, Layer, Masked, Spec};

pub mod record;

use record::ForeignRule;

/// Most filters of a rule: each layer once, outside and inside.
pub const MAX_SPECS: usize = 8;

/// Most rules that a host has; of others no more are entered.
pub const MAX_FLOWS: usize = 65_536;

/// `enum ibv_flow_attr_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowType {
    /// Frames that the filters match.
    Normal,
    /// Frames that no normal rule takes.
    AllDefault,
    /// As that, to groups only.
    McDefault,
    /// A copy of every frame.
    Sniffer,
}

/// What a program asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowAttr {
    /// Which frames.
    pub flow_type: FlowType,
    /// Rules of a lower number come first.
    pub priority: u16,
    /// Filters in the program's order; `over` is filled in.
    pub specs: ArrayVec<Spec, MAX_SPECS>,
    /// Frames that it takes meet the rules behind it as well.
    pub dont_trap: bool,
    /// For frames that are sent.
    pub egress: bool,
    /// Frames end here.
    pub drop: bool,
    /// For the completion of a receive.
    pub tag: Option<u32>,
}

/// Why a rule is none; `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FlowError {
    /// Two filters, or two actions, of one kind.
    #[error("two filters of one layer, or two actions of a kind")]
    Twice,
    /// `DONT_TRAP` of anything but a normal rule that delivers.
    #[error("only a normal rule that delivers may let frames pass on")]
    DontTrap,
    /// Filters of a rule whose type says what it takes.
    #[error("a rule of this type has no filters")]
    Filters,
    /// What the filters want excludes each other, so that no frame can match.
    #[error("no frame can match: the filters contradict each other")]
    Contradiction,
    /// An MPLS label does not lie on this, or filters of the outer headers follow it.
    #[error("an MPLS filter stands at a wrong place")]
    MplsOrder,
    /// A rule for frames that are sent has another type, or a tag.
    #[error("a rule for frames that are sent is normal, and gives no tag")]
    Egress,
    /// An ESP action encrypts what is received, or decrypts what is sent; or frames that it changed would pass on.
    #[error(
        "an ESP action encrypts what leaves and decrypts what arrives, in a normal rule that traps"
    )]
    EspPlace,
    /// Inline crypto without filters that find its packets.
    #[error("inline crypto wants filters of IP and ESP")]
    EspFilters,
}

/// A rule that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRule(FlowAttr);

impl FlowRule {
    /// Checks what a program asks for.
    pub fn new(mut attr: FlowAttr) -> Result<Self, FlowError> {
        let normal = attr.flow_type == FlowType::Normal;
        if attr.dont_trap && (!normal || attr.drop || attr.egress) {
            return Err(FlowError::DontTrap);
        }
        if !normal && !attr.specs.is_empty() {
            return Err(FlowError::Filters);
        }
        if attr.egress && (!normal || attr.tag.is_some()) {
            return Err(FlowError::Egress);
        }
        for inner in [false, true] {
            check_level(&mut attr.specs, inner)?;
        }
        let mpls_at =
            attr.specs.iter().position(|s| matches!(s.filter, Filter::Mpls { .. }) && !s.inner);
        if mpls_at.is_some_and(|at| attr.specs[at..].iter().skip(1).any(|s| !s.inner)) {
            return Err(FlowError::MplsOrder);
        }
        Ok(Self(attr))
    }

    /// Checks that an ESP action may be this rule's.
    ///
    /// # Errors
    /// [`FlowError::EspPlace`], [`FlowError::EspFilters`].
    pub fn check_esp(&self, esp: &EspAttr) -> Result<(), FlowError> {
        let rule = &self.0;
        let egress = esp.direction == Direction::Encrypt;
        if rule.flow_type != FlowType::Normal || rule.dont_trap || rule.egress != egress {
            return Err(FlowError::EspPlace);
        }
        let has = |fits: fn(&Filter) -> bool| {
            rule.specs.iter().any(|spec| !spec.inner && fits(&spec.filter))
        };
        let finds = has(|filter| filter.layer() == Layer::Network)
            && has(|filter| matches!(filter, Filter::Esp { .. }));
        if matches!(esp.offload, Offload::InlineCrypto { .. }) && !finds {
            return Err(FlowError::EspFilters);
        }
        Ok(())
    }

    /// Whether it is for frames that are sent.
    #[must_use]
    pub fn is_egress(&self) -> bool {
        self.0.egress
    }

    /// Whether the other takes the very same frames, and comes at the same time.
    fn is_twin_of(&self, other: &Self) -> bool {
        self.key() == other.key()
    }

    /// The same for twins alone.
    fn key(&self) -> (u16, FlowType, &[Spec]) {
        (self.0.priority, self.0.flow_type, &self.0.specs)
    }

    fn matches(&self, frame: &Frame<'_>) -> bool {
        match self.0.flow_type {
            FlowType::McDefault => frame.is_multicast(),
            _ => self.0.specs.iter().all(|spec| spec.matches(frame)),
        }
    }
}

/// Checks the filters of one level of headers, and notes what MPLS labels lie on.
fn check_level(specs: &mut ArrayVec<Spec, MAX_SPECS>, inner: bool) -> Result<(), FlowError> {
    let mut before: Option<Filter> = None;
    let mut seen: ArrayVec<Layer, 4> = ArrayVec::new();
    for spec in specs.iter_mut().filter(|spec| spec.inner == inner) {
        let layer = spec.filter.layer();
        if seen.contains(&layer) {
            return Err(FlowError::Twice);
        }
        seen.push(layer);
        if let Filter::Mpls { .. } = spec.filter {
            spec.over = match before {
                None => None,
                Some(Filter::Ethernet { .. }) => Some(MplsOver::Ethernet),
                Some(Filter::Udp { .. }) => Some(MplsOver::Udp),
                Some(Filter::Gre { .. }) => Some(MplsOver::Gre),
                Some(_) => return Err(FlowError::MplsOrder),
            };
        }
        before = Some(spec.filter);
    }
    let find = |layer| specs.iter().find(|s| s.inner == inner && s.filter.layer() == layer);
    let filter = |layer| find(layer).map(|spec| spec.filter);
    let network = filter(Layer::Network);
    if let (Some(Filter::Ethernet { ether_type, .. }), Some(network)) =
        (filter(Layer::Link), network)
    {
        let wanted = if matches!(network, Filter::Ipv4 { .. }) { 0x0800 } else { 0x86dd };
        if excludes(ether_type, wanted) {
            return Err(FlowError::Contradiction);
        }
    }
    let transport = filter(Layer::Transport);
    let proto = match network {
        Some(Filter::Ipv4 { proto, .. }) => proto,
        Some(Filter::Ipv6 { next_hdr, .. }) => next_hdr,
        _ => Masked::default(),
    };
    let wanted = match transport {
        Some(Filter::Tcp { .. }) => Some(6),
        Some(Filter::Udp { .. }) => Some(17),
        Some(Filter::Esp { .. }) => Some(50),
        Some(Filter::Gre { .. }) => Some(47),
        _ => None,
    };
    let vxlan = matches!(filter(Layer::Tunnel), Some(Filter::Vxlan { .. }));
    if wanted.is_some_and(|wanted| excludes(proto, wanted) || (vxlan && wanted != 17)) {
        return Err(FlowError::Contradiction);
    }
    Ok(())
}

/// Whether a value cannot match.
fn excludes<T: Copy + PartialEq + std::ops::BitAnd<Output = T>>(
    filter: Masked<T>,
    value: T,
) -> bool {
    filter.val & filter.mask != value & filter.mask
}

/// Where a frame came from, which says who else got a copy of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingress {
    /// This process, for itself alone.
    Process,
    /// A process of the host, perhaps this one.
    Host,
    /// A real interface, by its index.
    Interface(u32),
}

/// Which frames a process gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Those of the other processes of the host.
    pub host: bool,
    /// Those of the interface with this index; 0 for none.
    pub interface: u32,
}

impl Reach {
    fn includes(self, ingress: Ingress) -> bool {
        match ingress {
            Ingress::Process => false,
            Ingress::Host => self.host,
            Ingress::Interface(index) => index != 0 && self.interface == index,
        }
    }
}

/// What a rule leads to.
#[derive(Debug)]
enum Dest<D> {
    Own {
        id: u64,
        to: D,
    },
    /// In the process with this number, which gets these frames.
    Foreign {
        owner: u8,
        reach: Reach,
    },
}

/// A rule in the table.
#[derive(Debug)]
struct Entry<D> {
    rule: FlowRule,
    /// The older rule has the smaller one.
    age: u64,
    /// The age of the oldest of its twins.
    rank: u64,
    dest: Dest<D>,
}

/// What a frame meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The frame ends here; it is counted, and goes nowhere.
    pub drop: bool,
    /// For the completion; 0 without one.
    pub tag: u32,
}

/// The rules of a device, each with a destination, and those of other processes.
#[derive(Debug)]
pub struct FlowTable<D> {
    next: u64,
    /// How many are this process's, for frames that are received.
    own: usize,
    /// How many each other process has.
    foreign: BTreeMap<u8, usize>,
    sniffers: Vec<Entry<D>>,
    /// By priority, then by age; but twins stand together, at the place of the oldest.
    normal: Vec<Entry<D>>,
    /// As these.
    defaults: Vec<Entry<D>>,
    /// As these, for what is sent.
    egress: Vec<Entry<D>>,
}

impl<D> Default for FlowTable<D> {
    fn default() -> Self {
        Self {
            next: 0,
            own: 0,
            foreign: BTreeMap::new(),
            sniffers: Vec::new(),
            normal: Vec::new(),
            defaults: Vec::new(),
            egress: Vec::new(),
        }
    }
}

impl<D> FlowTable<D> {
    /// Enters a rule of this process; the number by which it is removed. `age` orders the rules of all processes.
    pub fn insert(&mut self, rule: FlowRule, age: u64, dest: D) -> u64 {
        let id = self.next;
        self.next += 1;
        let egress = rule.0.egress;
        self.own += usize::from(!egress);
        let list = if egress { &mut self.egress } else { self.list(rule.0.flow_type) };
        enter(list, Entry { rule, age, rank: age, dest: Dest::Own { id, to: dest } });
        id
    }

    fn list(&mut self, flow_type: FlowType) -> &mut Vec<Entry<D>> {
        match flow_type {
            FlowType::Normal => &mut self.normal,
            FlowType::Sniffer => &mut self.sniffers,
            FlowType::AllDefault | FlowType::McDefault => &mut self.defaults,
        }
    }

    /// Takes a rule out; what it led to.
    pub fn remove(&mut self, id: u64) -> Option<D> {
        let lists = [&mut self.sniffers, &mut self.normal, &mut self.defaults, &mut self.egress];
        for (received, list) in [true, true, true, false].into_iter().zip(lists) {
            let is_it = |e: &Entry<D>| matches!(e.dest, Dest::Own { id: i, .. } if i == id);
            if let Some(at) = list.iter().position(is_it)
                && let Dest::Own { to, .. } = take_out(list, at).dest
            {
                self.own -= usize::from(received);
                return Some(to);
            }
        }
        None
    }

    /// The rules of this process for frames that are received, with the numbers by which they are removed, the oldest first.
    #[must_use]
    pub fn own_rules(&self) -> Vec<(u64, &FlowRule)> {
        let lists = [&self.sniffers, &self.normal, &self.defaults];
        let own = lists.into_iter().flatten().filter_map(|entry| match entry.dest {
            Dest::Own { id, .. } => Some((entry.age, id, &entry.rule)),
            Dest::Foreign { .. } => None,
        });
        let mut own: Vec<_> = own.collect();
        own.sort_by_key(|(age, id, _)| (*age, *id));
        own.into_iter().map(|(_, id, rule)| (id, rule)).collect()
    }

    /// Gives rules of this process other ages, by their numbers.
    pub fn set_ages(&mut self, ages: &BTreeMap<u64, u64>) {
        for list in [&mut self.sniffers, &mut self.normal, &mut self.defaults] {
            for entry in &mut *list {
                if let Dest::Own { id, .. } = entry.dest
                    && let Some(age) = ages.get(&id)
                {
                    entry.age = *age;
                }
            }
            arrange(list);
        }
    }

    /// Replaces what the process `owner` has. What stood here already stays. False if some found no room.
    pub fn set_foreign(&mut self, owner: u8, rules: impl IntoIterator<Item = ForeignRule>) -> bool {
        let mut wanted: BTreeMap<u64, ForeignRule> =
            rules.into_iter().map(|r| (r.age, r)).collect();
        let mut count = self.foreign.remove(&owner).unwrap_or(0);
        let mut changed = [false; 2];
        for (list, changed) in [&mut self.normal, &mut self.defaults].into_iter().zip(&mut changed)
        {
            let before = list.len();
            list.retain(|entry| match entry.dest {
                Dest::Foreign { owner: of, reach } if of == owner => {
                    let is_same = |w: &ForeignRule| w.rule == entry.rule && w.reach == reach;
                    let stays = wanted.get(&entry.age).is_some_and(is_same);
                    if stays {
                        wanted.remove(&entry.age);
                    }
                    stays
                }
                _ => true,
            });
            count -= before - list.len();
            *changed = list.len() < before;
        }
        let room = MAX_FLOWS - self.foreign_len() - count;
        let fits = wanted.len() <= room;
        for (age, ForeignRule { rule, reach, .. }) in wanted.into_iter().take(room) {
            count += 1;
            let is_normal = rule.0.flow_type == FlowType::Normal;
            changed[usize::from(!is_normal)] = true;
            let list = if is_normal { &mut self.normal } else { &mut self.defaults };
            list.push(Entry { rule, age, rank: age, dest: Dest::Foreign { owner, reach } });
        }
        for (list, changed) in [&mut self.normal, &mut self.defaults].into_iter().zip(changed) {
            if changed {
                arrange(list);
            }
        }
        if count > 0 {
            self.foreign.insert(owner, count);
        }
        fits
    }

    /// How many rules of this process it has.
    #[must_use]
    pub fn own_len(&self) -> usize {
        self.own + self.egress.len()
    }

    /// How many rules of other processes it has.
    #[must_use]
    pub fn foreign_len(&self) -> usize {
        self.foreign.values().sum()
    }

    /// The processes whose rules these are.
    pub fn owners(&self) -> impl Iterator<Item = u8> {
        self.foreign.keys().copied()
    }

    /// Whether frames that are received meet no rule of this process.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.own == 0
    }

    /// Whether there are rules for frames that are sent.
    #[must_use]
    pub fn has_egress(&self) -> bool {
        !self.egress.is_empty()
    }

    /// Calls `meet` for each rule of this process that a received frame meets: the sniffers, then the normal rules up to the first that
    /// traps it, then, if none did, the first default rule; and the twins of these two, since each gets a copy. Rules of other processes
    /// trap as well, if these got the frame and `lives` says of the process that it has not ended.
    pub fn steer<'a>(
        &'a self,
        frame: &Frame<'_>,
        ingress: Ingress,
        mut lives: impl FnMut(u8) -> bool,
        mut meet: impl FnMut(&'a D, Verdict),
    ) {
        let mut call = |entry: &'a Entry<D>| {
            if let Dest::Own { to, .. } = &entry.dest {
                meet(to, entry.verdict());
            }
        };
        self.sniffers.iter().for_each(&mut call);
        if self.own == self.sniffers.len() {
            return;
        }
        let mut stands = |entry: &Entry<D>| match entry.dest {
            Dest::Own { .. } => entry.rule.matches(frame),
            Dest::Foreign { owner, reach } => {
                !entry.rule.0.dont_trap
                    && reach.includes(ingress)
                    && entry.rule.matches(frame)
                    && lives(owner)
            }
        };
        let mut trap: Option<&'a Entry<D>> = None;
        for entry in &self.normal {
            match trap {
                Some(first) if first.has_twin(entry) => call(entry),
                Some(_) => break,
                None if stands(entry) => {
                    call(entry);
                    trap = (!entry.rule.0.dont_trap).then_some(entry);
                }
                None => {}
            }
        }
        if trap.is_none()
            && let Some(at) = self.defaults.iter().position(stands)
        {
            let first = &self.defaults[at];
            call(first);
            self.defaults[at + 1..].iter().take_while(|e| first.has_twin(e)).for_each(call);
        }
    }

    /// Calls `meet` for the first rule that a frame meets as it is sent. False if that drops it.
    pub fn leave<'a>(&'a self, frame: &Frame<'_>, meet: impl FnOnce(&'a D)) -> bool {
        let Some(entry) = self.egress.iter().find(|e| e.rule.matches(frame)) else { return true };
        if let Dest::Own { to, .. } = &entry.dest {
            meet(to);
        }
        !entry.rule.0.drop
    }
}

/// Enters a rule at its place.
fn enter<D>(list: &mut Vec<Entry<D>>, mut entry: Entry<D>) {
    let priority = entry.rule.0.priority;
    let begin = list.partition_point(|e| e.rule.0.priority < priority);
    let end = list.partition_point(|e| e.rule.0.priority <= priority);
    let Some(first) = list[begin..end].iter().position(|e| e.rule.is_twin_of(&entry.rule)) else {
        return place(list, vec![entry]);
    };
    let first = begin + first;
    let twins = twins_from(list, first);
    if entry.age < list[first].age {
        let rest = list.drain(first..first + twins);
        let group = std::iter::once(entry).chain(rest).collect();
        return place(list, group);
    }
    entry.rank = list[first].rank;
    let at = list[first..first + twins].partition_point(|e| e.age <= entry.age);
    list.insert(first + at, entry);
}

/// Takes a rule out. Its twins move to the place of the oldest that is left.
fn take_out<D>(list: &mut Vec<Entry<D>>, at: usize) -> Entry<D> {
    let removed = list.remove(at);
    let was_first = at == 0 || !list[at - 1].rule.is_twin_of(&removed.rule);
    if was_first && list.get(at).is_some_and(|next| next.rule.is_twin_of(&removed.rule)) {
        let group = list.drain(at..at + twins_from(list, at)).collect();
        place(list, group);
    }
    removed
}

/// Puts all at their places.
fn arrange<D>(list: &mut Vec<Entry<D>>) {
    // The age of the oldest of the twins; and which twins, since others may give two rules one age.
    let mut groups: HashMap<_, (u64, usize)> = HashMap::new();
    for (n, entry) in list.iter().enumerate() {
        let group = groups.entry(entry.rule.key()).or_insert((entry.age, n));
        group.0 = group.0.min(entry.age);
    }
    let places: Vec<_> = list.iter().map(|entry| groups[&entry.rule.key()]).collect();
    let mut placed: Vec<_> = std::mem::take(list).into_iter().zip(places).collect();
    placed.sort_by_key(|(entry, (rank, group))| (entry.rule.0.priority, *rank, *group, entry.age));
    list.extend(placed.into_iter().map(|(entry, (rank, _))| Entry { rank, ..entry }));
}

/// How many twins stand together from here on.
fn twins_from<D>(list: &[Entry<D>], at: usize) -> usize {
    let (first, list) = (&list[at], &list[at..]);
    let place = (first.rule.0.priority, first.rank);
    let n = list.partition_point(|e| (e.rule.0.priority, e.rank) == place);
    // Others may give two rules one age: then more than twins stand there.
    if list[n - 1].rule.is_twin_of(&first.rule) {
        return n;
    }
    list.iter().take_while(|e| e.rule.is_twin_of(&first.rule)).count()
}

/// Enters twins, by age, where the oldest of them belongs.
fn place<D>(list: &mut Vec<Entry<D>>, mut group: Vec<Entry<D>>) {
    let Some(first) = group.first() else { return };
    let (priority, rank) = (first.rule.0.priority, first.age);
    group.iter_mut().for_each(|e| e.rank = rank);
    let at = list.partition_point(|e| (e.rule.0.priority, e.rank) <= (priority, rank));
    list.splice(at..at, group);
}

impl<D> Entry<D> {
    /// Whether the other gets a copy of what this one takes. Nobody gets one of what is dropped.
    fn has_twin(&self, other: &Self) -> bool {
        !self.rule.0.drop && self.rule.is_twin_of(&other.rule)
    }

    fn verdict(&self) -> Verdict {
        Verdict { drop: self.rule.0.drop, tag: self.rule.0.tag.unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests;
