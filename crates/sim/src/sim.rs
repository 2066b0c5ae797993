//! The simulation: devices, time, and the calls of a program.

use std::net::IpAddr;
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::cq::Cq;
use anyverbs_proto::env::{LinkProps, MemoryEnv};
use anyverbs_proto::memory::Memory;
use anyverbs_proto::mr::{Access, MrTable, Region};
use anyverbs_proto::qp::attr::{ModifyError, ModifyLimits, QpAttr, QpAttrMask, QpInit, QpState};
use anyverbs_proto::qp::lending::Lease;
use anyverbs_proto::qp::{Arrival, Incoming, PostSendError, Qp};
use anyverbs_proto::recv_queue::{PostRecvError, RecvQueue};
use anyverbs_proto::tag_list::TagList;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Mtu, PKey};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{AddressVector, RecvWr, SendWr, UdDest};
use anyverbs_proto::xrc_message;
use anyverbs_queue_memory::QueueMemory;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::device::{
    Around, CqId, CqSlot, Device, DeviceId, Event, Mr, QpId, QpPlace, QpSlot, Shared, SrqId,
    SrqSlot, XrcSrq,
};
use crate::direct::Chance;
use crate::lane::{AllLanes, Ends};
use crate::memory::Arena;
use crate::net::Net;
use crate::options::QpOptions;

/// Devices in virtual time. If a test panics, it prints its seed and the packets.
#[derive(Debug)]
pub struct Sim {
    seed: u64,
    pub(crate) now: Time,
    pub(crate) devices: Vec<Device>,
    pub(crate) gids: Vec<Gid>,
    /// Members of multicast groups, sorted by device.
    pub(crate) groups: Vec<(Gid, QpId)>,
    /// The delay of ACKs; zero: as long as packets of the same instant are left.
    pub ack_delay: Duration,
    chance: Chance,
    pub(crate) lanes: AllLanes,
    /// The network.
    pub net: Net,
}

impl Drop for Sim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "{}seed {}, stopped at {} ns",
                self.net.trace,
                self.seed,
                self.now.as_nanos()
            );
        }
    }
}

impl Sim {
    /// No devices yet.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            now: Time::from_nanos(1_000_000),
            devices: Vec::new(),
            gids: Vec::new(),
            groups: Vec::new(),
            ack_delay: Duration::ZERO,
            chance: Chance { rng: SmallRng::seed_from_u64(!seed), probability: 0.0 },
            lanes: AllLanes::new(seed.rotate_left(32)),
            net: Net::new(seed),
        }
    }

    /// The probability that a WRITE or READ is done without a message if it can be (`LinkEnv::direct`). It is 0 unless this
    /// was called.
    pub fn do_directly(&mut self, probability: f64) {
        self.chance.probability = probability;
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// Adds a device with the next address of 10.0.0.0/8.
    pub fn device(&mut self) -> DeviceId {
        let n = self.devices.len() as u8 + 1;
        self.device_at(IpAddr::from([10, 0, 0, n]))
    }

    /// Adds a device with this address.
    pub fn device_at(&mut self, ip: IpAddr) -> DeviceId {
        let id = DeviceId(self.devices.len());
        let gid = Gid::from(ip);
        self.gids.push(gid);
        self.devices.push(Device {
            shared: Shared {
                id,
                gid,
                memory: Arena::new((id.0 as u64 + 1) << 40),
                mrs: MrTable::new(10_000, self.seed ^ id.0 as u64),
                cqs: Vec::new(),
                free_cqs: Vec::new(),
                srqs: Vec::new(),
                events: Vec::new(),
                counters: Counters::default(),
                overrun: Vec::new(),
            },
            qps: Vec::new(),
            next_pd: 1,
            made_qps: 0,
        });
        id
    }

    /// The number of devices.
    #[must_use]
    pub fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// The address of a device.
    #[must_use]
    pub fn gid(&self, device: DeviceId) -> Gid {
        self.gids[device.0]
    }

    /// A new protection domain.
    pub fn pd(&mut self, device: DeviceId) -> u32 {
        let next = &mut self.devices[device.0].next_pd;
        *next += 1;
        *next - 1
    }

    /// Registers `len` new bytes.
    pub fn mr(&mut self, device: DeviceId, pd: u32, len: usize, access: Access) -> Mr {
        let addr =
            self.devices[device.0].shared.memory.alloc(len).expect("tests need little memory");
        self.register(device, pd, addr, len, access)
    }

    /// Registers bytes that are there already.
    pub fn register(
        &mut self,
        device: DeviceId,
        pd: u32,
        addr: u64,
        len: usize,
        access: Access,
    ) -> Mr {
        let registered = self.try_register(device, pd, addr, len, access);
        registered.expect("room for ten thousand regions")
    }

    /// As [`register`](Self::register). None if the device has no key left.
    pub fn try_register(
        &mut self,
        device: DeviceId,
        pd: u32,
        addr: u64,
        len: usize,
        access: Access,
    ) -> Option<Mr> {
        let region = Region { pd, access, iova: addr, len: len as u64, addr };
        let keys = self.devices[device.0].shared.mrs.register(region)?;
        Some(Mr { device, addr, len, lkey: keys.lkey, rkey: keys.rkey })
    }

    /// Deregisters.
    pub fn deregister(&mut self, mr: Mr) {
        let done = self.devices[mr.device.0].shared.mrs.deregister(mr.lkey, |_| ());
        done.expect("a region that no window is bound to");
    }

    /// The memory keys of a device.
    #[must_use]
    pub fn mrs(&self, device: DeviceId) -> &MrTable {
        &self.devices[device.0].shared.mrs
    }

    /// The memory of a device.
    #[must_use]
    pub fn memory(&self, device: DeviceId) -> &Arena {
        &self.devices[device.0].shared.memory
    }

    /// The bytes of a region.
    #[must_use]
    pub fn bytes(&self, mr: Mr, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.memory(mr.device).read(mr.addr + offset as u64, &mut bytes);
        read.expect("tests look at mapped memory");
        bytes
    }

    /// Writes to a region.
    pub fn write(&self, mr: Mr, offset: usize, bytes: &[u8]) {
        let written = self.memory(mr.device).write(mr.addr + offset as u64, bytes);
        written.expect("tests write to mapped memory");
    }

    /// Fills a region with bytes that `salt` decides.
    pub fn fill(&self, mr: Mr, salt: u64) {
        let mut bytes = vec![0; mr.len];
        SmallRng::seed_from_u64(salt).fill(bytes.as_mut_slice());
        self.write(mr, 0, &bytes);
    }

    /// The 8-byte word at `offset`.
    #[must_use]
    pub fn word(&self, mr: Mr, offset: usize) -> u64 {
        let bytes = self.bytes(mr, offset, 8);
        u64::from_ne_bytes(bytes.try_into().expect("eight bytes were read"))
    }

    /// A completion queue.
    pub fn cq(&mut self, device: DeviceId, cqe: u32) -> CqId {
        let shared = &mut self.devices[device.0].shared;
        let slot = CqSlot { cq: Cq::new(cqe), notified: 0 };
        let index = shared.free_cqs.pop().unwrap_or(shared.cqs.len());
        match shared.cqs.get_mut(index) {
            Some(free) => *free = slot,
            None => shared.cqs.push(slot),
        }
        CqId { device, index }
    }

    /// Destroys a completion queue that no queue pair uses, with its events.
    pub fn destroy_cq(&mut self, cq: CqId) {
        let shared = &mut self.devices[cq.device.0].shared;
        shared.cqs[cq.index] = CqSlot { cq: Cq::new(0), notified: 0 };
        shared.free_cqs.push(cq.index);
        shared.events.retain(|event| *event != Event::CqErr(cq));
    }

    /// A shared receive queue.
    pub fn srq(&mut self, device: DeviceId, max_wr: u32, max_sge: u32) -> SrqId {
        let srqs = &mut self.devices[device.0].shared.srqs;
        srqs.push(SrqSlot {
            queue: RecvQueue::new(max_wr, max_sge),
            limit: 0,
            xrc: None,
            tags: None,
        });
        SrqId { device, index: srqs.len() - 1 }
    }

    /// A shared receive queue of type XRC, in the XRC domain `xrcd`.
    pub fn xrc_srq(&mut self, pd: u32, xrcd: u32, cq: CqId, max_wr: u32, max_sge: u32) -> SrqId {
        let id = self.srq(cq.device, max_wr, max_sge);
        self.devices[cq.device.0].shared.srqs[id.index].xrc = Some(XrcSrq { pd, xrcd, cq });
        id
    }

    /// Destroys a shared receive queue of type XRC.
    pub fn destroy_xrc_srq(&mut self, srq: SrqId) {
        let slot = &mut self.devices[srq.device.0].shared.srqs[srq.index];
        assert!(slot.xrc.take().is_some(), "destroyed twice, or not of this type");
        slot.queue.clear();
    }

    /// The number by which peers name a shared receive queue of type XRC.
    #[must_use]
    pub fn srqn(&self, srq: SrqId) -> u32 {
        SrqId::first_srqn(srq.device) + srq.index as u32
    }

    /// A target in RESET, in the XRC domain `xrcd`. It has no completion queues of its own; `cq` only says where it is.
    pub fn xrc_target(&mut self, xrcd: u32, cq: CqId, options: &QpOptions) -> QpId {
        let id = self.qp(0, cq, cq, None, options);
        let slot = self.devices[id.device.0].qps[id.index].as_mut().expect("just made");
        slot.place.xrcd = Some(xrcd);
        id
    }

    /// A shared receive queue that matches tags; its queue pairs complete their receives where they would anyway.
    pub fn tm_srq(&mut self, device: DeviceId, max_wr: u32, max_sge: u32, tags: u16) -> SrqId {
        let id = self.srq(device, max_wr, max_sge);
        self.tags(id).replace(TagList::new(tags));
        id
    }

    /// Its tags.
    pub fn tags(&mut self, srq: SrqId) -> &mut Option<TagList> {
        &mut self.devices[srq.device.0].shared.srqs[srq.index].tags
    }

    /// Arms the limit event of a shared receive queue.
    pub fn arm_srq(&mut self, srq: SrqId, limit: usize) {
        self.devices[srq.device.0].shared.srqs[srq.index].limit = limit;
    }

    /// Posts to a shared receive queue.
    pub fn post_srq_recv(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), PostRecvError> {
        self.devices[srq.device.0].shared.srqs[srq.index].queue.push(wr)
    }

    /// A queue pair in RESET.
    pub fn qp(
        &mut self,
        pd: u32,
        send_cq: CqId,
        recv_cq: CqId,
        srq: Option<SrqId>,
        options: &QpOptions,
    ) -> QpId {
        let device = send_cq.device;
        let init = QpInit {
            qp_type: options.qp_type,
            cap: options.cap,
            sq_sig_all: options.sq_sig_all,
            srq: srq.is_some(),
            pd,
        };
        self.net.segments |= options.segment > 0;
        let qps = &self.devices[device.0].qps;
        let index = qps.iter().position(Option::is_none).unwrap_or(qps.len());
        let id = QpId { device, index };
        let qpn = self.devices[device.0].next_qpn(device);
        let matches =
            srq.is_some_and(|srq| self.devices[device.0].shared.srqs[srq.index].tags.is_some());
        let qps = &mut self.devices[device.0].qps;
        let qp = if matches {
            Qp::with_tag_matching(&init, &QueueMemory::HEAP)
                .expect("the heap has room")
                .numbered(qpn)
        } else {
            Qp::new(qpn, &init)
        };
        let qp = if options.short_ways { qp } else { qp.without_short_ways() };
        let credit = qp.sq_credit();
        let place = QpPlace {
            id,
            qpn,
            send_cq,
            recv_cq,
            srq,
            xrcd: None,
            link: LinkProps {
                segment: options.segment,
                batch: options.batch,
                window: options.window,
                probe_after: options.probe_after,
                certain: options.certain,
                out_of_order_room: options.out_of_order_room,
                // As the same-host link, whose packets may stand for several.
                immediate: options.segment > 0 || options.has_lanes(),
                carries_acks: options.carries_acks,
            },
            blocked_until: None,
            ack_at: None,
            more: false,
            next_link: None,
            lanes: Ends::default(),
        };
        let slot = Some(QpSlot { qp, credit, place });
        match qps.get_mut(index) {
            Some(free) => *free = slot,
            None => qps.push(slot),
        }
        id
    }

    /// The number of queue pairs of a device.
    #[must_use]
    pub fn qp_count(&self, device: DeviceId) -> usize {
        self.devices[device.0].qps.iter().flatten().count()
    }

    /// Destroys a queue pair, with its completions and events.
    pub fn destroy(&mut self, qp: QpId) {
        self.with(qp, |qp, env| qp.repeat_last_answers(env));
        let slot = self.devices[qp.device.0].qps[qp.index].take();
        let mut slot = slot.expect("a queue pair is destroyed once");
        self.lanes.leave(&mut slot.place.lanes);
        self.purge(&slot.place);
        let events = &mut self.devices[qp.device.0].shared.events;
        events.retain(|event| !matches!(event, Event::Qp(of, _) if *of == qp));
    }

    fn purge(&mut self, place: &QpPlace) {
        if place.xrcd.is_some() {
            // Completions of messages in an SRQ's completion queue stay.
            return;
        }
        for cq in [place.send_cq, place.recv_cq] {
            self.devices[cq.device.0].shared.cqs[cq.index].cq.purge(place.qpn);
        }
    }

    /// The machine of a queue pair.
    #[must_use]
    pub fn get(&self, qp: QpId) -> &Qp {
        &self.slot(qp).qp
    }

    /// From now on a queue pair sends packets as long as this, see `LinkProps::segment`: it has taken another link.
    pub fn set_segment(&mut self, qp: QpId, segment: u32) {
        self.net.segments |= segment > 0;
        let slot = self.devices[qp.device.0].qps[qp.index].as_mut();
        let place = &mut slot.expect("the queue pair lives").place;
        (place.link.segment, place.link.immediate) = (segment, segment > 0);
        self.lanes.leave(&mut place.lanes);
    }

    /// The next packet of a queue pair finds its link gone, and takes one by UDP, which loses packets.
    pub fn reroute_next(&mut self, qp: QpId) {
        let slot = self.devices[qp.device.0].qps[qp.index].as_mut();
        let place = &mut slot.expect("the queue pair lives").place;
        place.next_link = Some(LinkProps {
            probe_after: Some(Duration::from_millis(8)),
            carries_acks: true,
            ..LinkProps::new(place.link.window)
        });
    }

    pub(crate) fn slot(&self, qp: QpId) -> &QpSlot {
        self.devices[qp.device.0].qps[qp.index].as_ref().expect("the queue pair lives")
    }

    /// Calls into a queue pair with its device around it.
    pub(crate) fn with<R>(&mut self, id: QpId, f: impl FnOnce(&mut Qp, &mut Around<'_>) -> R) -> R {
        let (before, rest) = self.devices.split_at_mut(id.device.0);
        let (device, behind) = rest.split_first_mut().expect("the device is one of them");
        let QpSlot { qp, place, .. } = device.qps[id.index].as_mut().expect("the queue pair lives");
        let mut env = Around {
            now: self.now,
            shared: &mut device.shared,
            place,
            net: &mut self.net,
            gids: &self.gids,
            groups: &self.groups,
            chance: &mut self.chance,
            lanes: &mut self.lanes,
            before,
            behind,
        };
        let result = f(qp, &mut env);
        place.ack_at = match place.ack_at {
            _ if !qp.owes_ack() => None,
            None => Some(place.blocked_until.unwrap_or(self.now + self.ack_delay)),
            held => held,
        };
        self.fail_overrun(id.device);
        result
    }

    /// Moves a target's responder to a machine of its own, as if to the process of another SRQ. False if it is not
    /// between messages.
    pub fn move_responder(&mut self, target: QpId) -> bool {
        let Some((attr, lease)) = self.lease(target) else { return false };
        self.put_responder(target, &attr, &lease);
        true
    }

    /// A target's responder, if it is between messages.
    pub fn lease(&mut self, target: QpId) -> Option<(QpAttr, Lease)> {
        self.with(target, |qp, env| {
            qp.transmit(env);
            qp.acknowledge(env);
            Some((qp.attr(), qp.lease()?))
        })
    }

    /// Has a target go on with this responder.
    pub fn put_responder(&mut self, target: QpId, attr: &QpAttr, lease: &Lease) {
        self.with(target, |qp, env| {
            let (first, srqs) = (SrqId::first_srqn(target.device), &env.shared.srqs);
            let pd_of = |srqn: u32| Some(srqs.get(srqn.checked_sub(first)? as usize)?.xrc?.pd);
            *qp = Qp::borrowed(qp.qpn(), attr, lease, pd_of);
        });
    }

    /// A request for a target as it is handed on to where the responder is.
    pub fn handed_on(
        &mut self,
        target: QpId,
        arrival: &Arrival,
        packet: &Incoming<'_>,
    ) -> Option<Vec<u8>> {
        self.with(target, |qp, env| xrc_message::packet(qp.qpn(), arrival, packet, env.memory()))
    }

    /// Gives a target a request that was handed on to it.
    pub fn receive_handed_on(&mut self, target: QpId, arrival: &Arrival, packet: &Incoming<'_>) {
        self.with(target, |qp, env| {
            qp.receive(arrival, packet, env);
            qp.acknowledge(env);
        });
    }

    /// Queue pairs whose completion queue overran go to ERR.
    fn fail_overrun(&mut self, device: DeviceId) {
        while let Some(cq) = self.devices[device.0].shared.overrun.pop() {
            let slots = self.devices[device.0].qps.iter().flatten();
            let uses_it = slots.filter(|s| s.place.send_cq == cq || s.place.recv_cq == cq);
            for qp in uses_it.map(|s| s.place.id).collect::<Vec<_>>() {
                self.with(qp, |qp, env| qp.fail(Cause::CqOverrun, env));
            }
        }
    }

    pub(crate) fn qps(&self) -> impl Iterator<Item = &QpSlot> {
        self.devices.iter().flat_map(|d| d.qps.iter().flatten())
    }

    /// `ibv_modify_qp`.
    pub fn modify(&mut self, qp: QpId, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyError> {
        let limits = ModifyLimits {
            ports: 1,
            pkeys: &[PKey::DEFAULT],
            max_mtu: Mtu::Mtu4096,
            max_rd_atomic: 128,
            max_rate_limit: 400_000_000,
        };
        let result = self.with(qp, |qp, env| {
            let result = qp.modify(attr, mask, &limits, env);
            qp.transmit_rest(env);
            result
        });
        if result.is_ok() && self.get(qp).state() == QpState::Reset {
            let device = &mut self.devices[qp.device.0];
            let slot = device.qps[qp.index].take();
            if let Some(mut slot) = slot {
                self.lanes.leave(&mut slot.place.lanes);
                self.purge(&slot.place);
                slot.qp.free_send_slots();
                self.devices[qp.device.0].qps[qp.index] = Some(slot);
            }
        }
        result
    }

    /// Moves to a state without further attributes.
    pub fn to_state(&mut self, qp: QpId, state: QpState) {
        let attr = QpAttr { state, ..QpAttr::default() };
        self.modify(qp, &attr, QpAttrMask::STATE).expect("a transition without attributes");
    }

    /// The path from a device to another.
    #[must_use]
    pub fn av(&self, from: DeviceId, to: DeviceId) -> AddressVector {
        AddressVector {
            dgid: self.gid(to),
            sgid: self.gid(from),
            hop_limit: 64,
            port: 1,
            ..AddressVector::default()
        }
    }

    /// `ibv_attach_mcast`.
    pub fn attach(&mut self, qp: QpId, group: Gid) {
        assert!(group.is_multicast());
        self.groups.push((group, qp));
        self.groups.sort_by_key(|(_, qp)| *qp);
    }

    /// `ibv_detach_mcast`.
    pub fn detach(&mut self, qp: QpId, group: Gid) {
        self.groups.retain(|member| *member != (group, qp));
    }

    /// The destination that reaches the queue pair `to` from the device of `from`.
    #[must_use]
    pub fn dest(&self, from: QpId, to: QpId) -> UdDest {
        let (pd, av) = (self.get(from).init().pd, self.av(from.device, to.device));
        UdDest::new(pd, av, self.get(to).qpn(), self.get(to).attr().qkey)
    }

    /// Queues a send; [`Sim::transmit`] sends it.
    pub fn queue_send(&mut self, qp: QpId, wr: &SendWr<'_>) -> Result<(), PostSendError> {
        if self.post_by_lane(qp, wr) {
            return Ok(());
        }
        self.with(qp, |qp, env| qp.post_send(wr, env))
    }

    /// Lets a queue pair send.
    pub fn transmit(&mut self, qp: QpId) {
        self.with(qp, |qp, env| qp.transmit(env));
    }

    /// `ibv_post_send` of one request.
    pub fn post_send(&mut self, qp: QpId, wr: &SendWr<'_>) -> Result<(), PostSendError> {
        let result = self.queue_send(qp, wr);
        self.transmit(qp);
        result
    }

    /// `ibv_post_recv` of one request.
    pub fn post_recv(&mut self, qp: QpId, wr: &RecvWr<'_>) -> Result<(), PostRecvError> {
        self.with(qp, |qp, env| qp.post_recv(wr, env))
    }

    /// Polls up to `most` completions.
    pub fn poll_some(&mut self, cq: CqId, most: usize) -> Vec<Wc> {
        let device = &mut self.devices[cq.device.0];
        let queue = &mut device.shared.cqs[cq.index].cq;
        let mut wcs = vec![Wc::default(); most.min(queue.len())];
        let n = queue.poll(&mut wcs);
        assert_eq!(n, wcs.len());
        for wc in &wcs {
            if wc.opcode.is_recv() {
                continue;
            }
            if let Some(qp) = device.by_qpn(wc.qpn) {
                let slot = device.qps[qp.index].as_ref().expect("it was found");
                slot.credit.release(wc.sq_count);
            }
        }
        wcs
    }

    /// Completions that wait to be polled.
    #[must_use]
    pub fn completions(&self, cq: CqId) -> usize {
        self.devices[cq.device.0].shared.cqs[cq.index].cq.len()
    }

    /// Polls everything.
    pub fn poll(&mut self, cq: CqId) -> Vec<Wc> {
        self.poll_some(cq, usize::MAX)
    }

    /// `ibv_req_notify_cq`.
    pub fn arm(&mut self, cq: CqId, solicited_only: bool) {
        self.devices[cq.device.0].shared.cqs[cq.index].cq.arm(solicited_only);
    }

    /// The number of notifications to the channel of a completion queue.
    #[must_use]
    pub fn notified(&self, cq: CqId) -> usize {
        self.devices[cq.device.0].shared.cqs[cq.index].notified
    }

    /// The asynchronous events of a device since the last call.
    pub fn events(&mut self, device: DeviceId) -> Vec<Event> {
        std::mem::take(&mut self.devices[device.0].shared.events)
    }

    /// A counter of a device.
    #[must_use]
    pub fn counter(&self, device: DeviceId, counter: Counter) -> u64 {
        self.devices[device.0].shared.counters.read(counter)
    }
}
