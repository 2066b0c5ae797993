//! A device: the environment of one host's queue pairs.

use std::fmt;
use std::sync::Arc;

use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::cq::Cq;
use anyverbs_proto::direct::{Direct, Place};
use anyverbs_proto::env::{
    CompletionEnv, Env, LinkEnv, LinkProps, MemoryEnv, ReasonEnv, Side, TransmitError,
};
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::mr::MrTable;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::{Arrival, Qp, SqCredit};
use anyverbs_proto::recv_queue::{RecvQueue, RecvWqe};
use anyverbs_proto::tag_list::{TagList, Tagged, Taken};
use anyverbs_proto::time::{Clock, Time};
use anyverbs_proto::types::{Gid, Psn, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::carried_ack;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::{AddressVector, RemoteAddr, Sge};

use crate::direct::Chance;
use crate::lane::{AllLanes, Ends};
use crate::memory::Arena;
use crate::net::{Beside, Net};

/// A device of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceId(pub(crate) usize);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match u8::try_from(self.0) {
            Ok(letter @ 0..26) => write!(f, "{}", (b'A' + letter) as char),
            _ => write!(f, "{}", self.0),
        }
    }
}

/// A queue pair of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QpId {
    /// Its device.
    pub device: DeviceId,
    pub(crate) index: usize,
}

/// A completion queue of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CqId {
    /// Its device.
    pub device: DeviceId,
    pub(crate) index: usize,
}

/// A shared receive queue of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SrqId {
    /// Its device.
    pub device: DeviceId,
    pub(crate) index: usize,
}

impl SrqId {
    /// The number of a device's first one.
    pub(crate) fn first_srqn(device: DeviceId) -> u32 {
        ((device.0 as u32 + 1) << 16) + 0x100
    }
}

/// A memory region; its iova is its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mr {
    /// Its device.
    pub device: DeviceId,
    /// Its first byte.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
}

impl Mr {
    /// A piece of it.
    #[must_use]
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.addr + offset as u64, len: len as u32, lkey: self.lkey }
    }

    /// A place in it, for a peer.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { va: self.addr + offset as u64, rkey: self.rkey }
    }
}

/// An asynchronous event of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An event of a queue pair.
    Qp(QpId, QpEvent),
    /// A shared receive queue fell below its limit.
    SrqLimitReached(SrqId),
    /// A completion queue lost a completion.
    CqErr(CqId),
}

/// A completion queue and its channel.
#[derive(Debug)]
pub(crate) struct CqSlot {
    pub(crate) cq: Cq,
    /// Number of notifications to the channel.
    pub(crate) notified: usize,
}

/// A shared receive queue and its limit; 0: not armed.
#[derive(Debug)]
pub(crate) struct SrqSlot {
    pub(crate) queue: RecvQueue,
    pub(crate) limit: usize,
    /// Set for an SRQ of type XRC that is not destroyed.
    pub(crate) xrc: Option<XrcSrq>,
    /// The tags of an SRQ that matches them.
    pub(crate) tags: Option<TagList>,
}

/// The further attributes of an XRC shared receive queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XrcSrq {
    pub(crate) pd: u32,
    pub(crate) xrcd: u32,
    pub(crate) cq: CqId,
}

/// The state that the queue pairs of a device share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: DeviceId,
    pub(crate) gid: Gid,
    pub(crate) memory: Arena,
    pub(crate) mrs: MrTable,
    pub(crate) cqs: Vec<CqSlot>,
    /// Places in `cqs` of queues that were destroyed.
    pub(crate) free_cqs: Vec<usize>,
    pub(crate) srqs: Vec<SrqSlot>,
    pub(crate) events: Vec<Event>,
    pub(crate) counters: Counters,
    /// Completion queues that overran. Their queue pairs have not been moved to ERR yet.
    pub(crate) overrun: Vec<CqId>,
}

/// The place of a queue pair in its device.
#[derive(Debug)]
pub(crate) struct QpPlace {
    pub(crate) id: QpId,
    pub(crate) qpn: Qpn,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
    /// On XRC the SRQ that was selected last.
    pub(crate) srq: Option<SrqId>,
    /// XRC domain of a target.
    pub(crate) xrcd: Option<u32>,
    pub(crate) link: LinkProps,
    /// The path had no room; it has at this time.
    pub(crate) blocked_until: Option<Time>,
    /// When a held ACK is sent.
    pub(crate) ack_at: Option<Time>,
    /// More packets come at this moment, perhaps for this queue pair.
    pub(crate) more: bool,
    /// The next packet finds the link gone, and takes this one.
    pub(crate) next_link: Option<LinkProps>,
    pub(crate) lanes: Ends,
}

#[derive(Debug)]
pub(crate) struct QpSlot {
    pub(crate) qp: Qp,
    pub(crate) credit: Arc<SqCredit>,
    pub(crate) place: QpPlace,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) shared: Shared,
    /// `None` was destroyed; a new one takes its place.
    pub(crate) qps: Vec<Option<QpSlot>>,
    pub(crate) next_pd: u32,
    /// Queue pairs that were ever made.
    pub(crate) made_qps: u32,
}

/// Numbers of queue pairs that each device has.
const QPNS: u32 = 0xffff - 0x10;

impl Device {
    /// A number that no queue pair has, and that none had for long.
    pub(crate) fn next_qpn(&mut self, id: DeviceId) -> Qpn {
        loop {
            let qpn = Qpn::new(((id.0 as u32 + 1) << 16) + 0x10 + self.made_qps % QPNS);
            self.made_qps = self.made_qps.wrapping_add(1);
            if self.by_qpn(qpn).is_none() {
                return qpn;
            }
        }
    }

    pub(crate) fn by_qpn(&self, qpn: Qpn) -> Option<QpId> {
        self.qps.iter().flatten().find(|slot| slot.place.qpn == qpn).map(|slot| slot.place.id)
    }
}

/// The environment of one call.
pub(crate) struct Around<'a> {
    pub(crate) now: Time,
    pub(crate) shared: &'a mut Shared,
    pub(crate) place: &'a mut QpPlace,
    pub(crate) net: &'a mut Net,
    pub(crate) gids: &'a [Gid],
    pub(crate) groups: &'a [(Gid, QpId)],
    pub(crate) chance: &'a mut Chance,
    pub(crate) lanes: &'a mut AllLanes,
    /// The other devices.
    pub(crate) before: &'a [Device],
    pub(crate) behind: &'a [Device],
}

impl Clock for Around<'_> {
    fn now(&self) -> Time {
        self.now
    }
}

impl Env for Around<'_> {
    fn count(&self, counter: Counter, n: u64) {
        self.shared.counters.add(counter, n);
    }
}

impl LinkEnv for Around<'_> {
    fn props(&self) -> &LinkProps {
        &self.place.link
    }

    fn more_follow(&self) -> bool {
        self.place.more
    }

    fn transmit(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
        acks: Option<Psn>,
    ) -> Result<(), TransmitError> {
        assert_eq!(av.sgid, self.shared.gid, "a packet from another address");
        let mut headers = *headers;
        let elsewhere = payload.fetched().map(|at| (at, payload.len() as u32));
        let payload = if elsewhere.is_some() { &Payload::EMPTY } else { payload };
        headers.bth.pad = Bth::pad_of(payload.len());
        let start = headers.len();
        let end = start + payload.len();
        let mut bytes = vec![0; end + usize::from(headers.bth.pad)];
        headers.emit(&mut bytes);
        payload.copy_to(&self.shared.mrs, &self.shared.memory, &mut bytes[start..end])?;
        let mut acks = acks;
        if let Some(link) = self.place.next_link.take() {
            (self.place.link, acks) = (link, None);
            self.lanes.leave(&mut self.place.lanes);
        }
        if self.place.link.carries_acks {
            carried_ack::announce(&mut bytes);
        }
        if acks.is_some() {
            self.count(Counter::AcksSent, 1);
        }
        if !self.place.link.immediate
            && let Some(acks) = acks.take()
        {
            bytes.extend([0; carried_ack::LEN]);
            carried_ack::write(acks, &mut bytes);
        }
        let ip_version_has_flow = av.dgid.to_ip().is_ipv6();
        let arrival = Arrival {
            source: av.sgid,
            destination: av.dgid,
            traffic_class: av.traffic_class,
            hop_limit: av.hop_limit,
            flow_label: if ip_version_has_flow { av.flow_label } else { 0 },
            interface: 0,
            port: 0,
        };
        if av.dgid.is_multicast() {
            let mut members: Vec<DeviceId> = self
                .groups
                .iter()
                .filter(|(g, _)| *g == av.dgid)
                .map(|(_, qp)| qp.device)
                .collect();
            members.dedup();
            for to in members {
                // A sender does not wait for a group: a packet that finds no room is lost.
                let _ = self.net.send(self.now, self.shared.id, Some(to), arrival, bytes.clone());
            }
            return Ok(());
        }
        let to = self.gids.iter().position(|gid| *gid == av.dgid).map(DeviceId);
        self.net.send(self.now, self.shared.id, to, arrival, bytes).map_err(|until| {
            self.place.blocked_until = Some(until);
            TransmitError::Blocked
        })?;
        if acks.is_some() || elsewhere.is_some() {
            self.net.carry(Beside { acks, elsewhere });
        }
        Ok(())
    }

    fn direct(&mut self, operation: &Direct<'_>) -> bool {
        self.do_directly(operation)
    }

    fn admits(&self, operation: &Direct<'_>) -> bool {
        self.chance.probability > 0.0 && self.open_peer(operation).is_some()
    }

    fn fetched(&mut self, payload: &Payload<'_>) -> Option<Place> {
        self.place_to_fetch(payload)
    }
}

impl ReasonEnv for Around<'_> {}

impl MemoryEnv for Around<'_> {
    type Memory = Arena;

    fn memory(&self) -> &Arena {
        &self.shared.memory
    }

    fn mrs(&self) -> &MrTable {
        &self.shared.mrs
    }
}

impl CompletionEnv for Around<'_> {
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool) {
        assert_eq!(wc.qpn, self.place.qpn, "a completion of another queue pair");
        let cq = match side {
            Side::Send => self.place.send_cq,
            Side::Recv if self.place.xrcd.is_some() => {
                let srq = self.place.srq.expect("a receive was taken from it");
                let xrc = self.shared.srqs[srq.index].xrc;
                // The SRQ was destroyed, and its receives with it.
                let Some(xrc) = xrc else { return };
                xrc.cq
            }
            Side::Recv => self.place.recv_cq,
        };
        let slot = &mut self.shared.cqs[cq.index];
        let pushed = slot.cq.push(wc, solicited);
        slot.notified += usize::from(pushed.notify);
        if pushed.overrun {
            self.shared.events.push(Event::CqErr(cq));
            self.shared.overrun.push(cq);
        }
    }

    fn select_srq(&mut self, srqn: u32) -> Option<u32> {
        let index = srqn.checked_sub(SrqId::first_srqn(self.shared.id))? as usize;
        let xrc = self.shared.srqs.get(index)?.xrc?;
        if self.place.xrcd != Some(xrc.xrcd) {
            return None;
        }
        self.place.srq = Some(SrqId { device: self.shared.id, index });
        Some(xrc.pd)
    }

    fn take_srq(&mut self, into: &mut RecvWqe) -> bool {
        let id = self.place.srq.expect("only called with an SRQ");
        let slot = &mut self.shared.srqs[id.index];
        let taken = slot.queue.pop(into);
        if slot.queue.len() < slot.limit {
            slot.limit = 0;
            self.shared.events.push(Event::SrqLimitReached(id));
        }
        taken
    }

    fn take_tagged(&mut self, tagged: Tagged, into: &mut RecvWqe) -> Option<Taken> {
        let id = self.place.srq.expect("only called with an SRQ");
        let slot = &mut self.shared.srqs[id.index];
        let tags = slot.tags.as_mut().expect("it matches tags");
        match tagged {
            Tagged::Tag(tag) if tags.take(tag, into) => Some(Taken::Matched),
            _ if !slot.queue.pop(into) => None,
            Tagged::None => Some(Taken::Untagged),
            _ => {
                tags.count_unexpected();
                Some(Taken::Unexpected)
            }
        }
    }

    fn raise(&mut self, event: QpEvent) {
        self.shared.events.push(Event::Qp(self.place.id, event));
    }
}
