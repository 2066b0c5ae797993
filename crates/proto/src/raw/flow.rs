//! Flow rules: the rules that may be made, and the rules that a frame meets (`ibv_create_flow(3)`).

use arrayvec::ArrayVec;
use thiserror::Error;

use super::esp::{Direction, EspAttr, Offload};
use super::frame::{Frame, MplsOver};
use super::spec::{Filter, Layer, Masked, Spec};

/// Most filters of a rule: each layer once, outside and inside.
pub const MAX_SPECS: usize = 8;

/// `enum ibv_flow_attr_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A program's request for a rule.
#[derive(Clone, Debug)]
pub struct FlowAttr {
    /// The frames that it takes.
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

/// The reason why a rule is refused; `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FlowError {
    /// Two filters, or two actions, of one kind.
    #[error("two filters of one layer, or two actions of a kind")]
    Twice,
    /// `DONT_TRAP` of anything but a normal rule that delivers.
    #[error("only a normal rule that delivers may let frames pass on")]
    DontTrap,
    /// The rule's type already says which frames it takes, so filters are not allowed.
    #[error("a rule of this type has no filters")]
    Filters,
    /// The filters exclude each other, so that no frame can match.
    #[error("no frame can match: the filters contradict each other")]
    Contradiction,
    /// An MPLS label does not lie on this, or filters of the outer headers follow it.
    #[error("an MPLS filter stands at a wrong place")]
    MplsOrder,
    /// A rule for frames that are sent has another type, or a tag.
    #[error("a rule for frames that are sent is normal, and gives no tag")]
    Egress,
    /// An ESP action encrypts received frames, or decrypts sent ones, or frames that it changed would pass on.
    #[error(
        "an ESP action encrypts what leaves and decrypts what arrives, in a normal rule that traps"
    )]
    EspPlace,
    /// Inline crypto without filters that find its packets.
    #[error("inline crypto wants filters of IP and ESP")]
    EspFilters,
}

/// A rule that was checked.
#[derive(Clone, Debug)]
pub struct FlowRule(FlowAttr);

impl FlowRule {
    /// Checks a program's request.
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

    /// Tells whether the other rule takes the very same frames at the same priority.
    fn is_twin_of(&self, other: &Self) -> bool {
        let (a, b) = (&self.0, &other.0);
        a.priority == b.priority && a.flow_type == b.flow_type && a.specs == b.specs
    }

    fn matches(&self, frame: &Frame<'_>) -> bool {
        match self.0.flow_type {
            FlowType::McDefault => frame.is_multicast(),
            _ => self.0.specs.iter().all(|spec| spec.matches(frame)),
        }
    }
}

/// Checks the filters of one level of headers, and notes the header below MPLS labels.
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

/// A rule in the table.
#[derive(Debug)]
struct Entry<D> {
    id: u64,
    rule: FlowRule,
    dest: D,
}

/// The action for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The frame ends here; it is counted, and goes nowhere.
    pub drop: bool,
    /// For the completion; 0 without one.
    pub tag: u32,
}

/// The rules of a device, each with a destination.
#[derive(Debug)]
pub struct FlowTable<D> {
    next: u64,
    sniffers: Vec<Entry<D>>,
    /// The rules by priority, then in the order in which they were made. Twins stand together.
    normal: Vec<Entry<D>>,
    /// As these.
    defaults: Vec<Entry<D>>,
    /// As these, for frames that are sent.
    egress: Vec<Entry<D>>,
}

impl<D> Default for FlowTable<D> {
    fn default() -> Self {
        Self {
            next: 0,
            sniffers: Vec::new(),
            normal: Vec::new(),
            defaults: Vec::new(),
            egress: Vec::new(),
        }
    }
}

impl<D> FlowTable<D> {
    /// Enters a rule; the number by which it is removed.
    pub fn insert(&mut self, rule: FlowRule, dest: D) -> u64 {
        let id = self.next;
        self.next += 1;
        let list = match (rule.0.egress, rule.0.flow_type) {
            (true, _) => &mut self.egress,
            (_, FlowType::Normal) => &mut self.normal,
            (_, FlowType::Sniffer) => &mut self.sniffers,
            (_, FlowType::AllDefault | FlowType::McDefault) => &mut self.defaults,
        };
        let end = list.partition_point(|e| e.rule.0.priority <= rule.0.priority);
        let begin = list.partition_point(|e| e.rule.0.priority < rule.0.priority);
        let twin = list[begin..end].iter().rposition(|e| e.rule.is_twin_of(&rule));
        list.insert(twin.map_or(end, |at| begin + at + 1), Entry { id, rule, dest });
        id
    }

    /// Takes a rule out. Gives its destination.
    pub fn remove(&mut self, id: u64) -> Option<D> {
        for list in [&mut self.sniffers, &mut self.normal, &mut self.defaults, &mut self.egress] {
            if let Some(at) = list.iter().position(|e| e.id == id) {
                return Some(list.remove(at).dest);
            }
        }
        None
    }

    /// Tells whether there is no rule for received frames.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sniffers.is_empty() && self.normal.is_empty() && self.defaults.is_empty()
    }

    /// Tells whether there are rules for frames that are sent.
    #[must_use]
    pub fn has_egress(&self) -> bool {
        !self.egress.is_empty()
    }

    /// Calls `meet` for each rule that a received frame meets. These are the sniffers, then the normal rules up to the
    /// first that traps the frame, then, if none did, the first default rule. The twins of the last two meet it as
    /// well, since each gets a copy. False if there was none.
    pub fn steer<'a>(&'a self, frame: &Frame<'_>, mut meet: impl FnMut(&'a D, Verdict)) -> bool {
        let mut met = false;
        let mut call = |entry: &'a Entry<D>| {
            met = true;
            meet(&entry.dest, entry.verdict());
        };
        self.sniffers.iter().for_each(&mut call);
        let mut trap: Option<&'a Entry<D>> = None;
        for entry in self.normal.iter() {
            match trap {
                Some(first) if first.has_twin(entry) => call(entry),
                Some(_) => break,
                None if entry.rule.matches(frame) => {
                    call(entry);
                    trap = (!entry.rule.0.dont_trap).then_some(entry);
                }
                None => {}
            }
        }
        if trap.is_none()
            && let Some(at) = self.defaults.iter().position(|e| e.rule.matches(frame))
        {
            let first = &self.defaults[at];
            call(first);
            self.defaults[at + 1..].iter().take_while(|e| first.has_twin(e)).for_each(call);
        }
        met
    }

    /// Calls `meet` for the first rule that a frame meets as it is sent. False if that drops it.
    pub fn leave<'a>(&'a self, frame: &Frame<'_>, meet: impl FnOnce(&'a D)) -> bool {
        let Some(entry) = self.egress.iter().find(|e| e.rule.matches(frame)) else { return true };
        meet(&entry.dest);
        !entry.rule.0.drop
    }
}

impl<D> Entry<D> {
    /// Tells whether the other rule gets a copy of the frames that this one takes. A dropped frame is not copied.
    fn has_twin(&self, other: &Self) -> bool {
        !self.rule.0.drop && self.rule.is_twin_of(&other.rule)
    }

    fn verdict(&self) -> Verdict {
        Verdict { drop: self.rule.0.drop, tag: self.rule.0.tag.unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests;
