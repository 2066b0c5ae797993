//! Random posts.

use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::wc::WcOpcode;
use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, UdDest};
use rand::Rng;
use rand::seq::IndexedRandom;

use crate::slots::{Slot, cut};
use crate::world::{COUNTERS, Check, Host, Message, Send, World};

/// A request in the making.
struct Draft {
    op: SendOp,
    sges: Vec<Sge>,
    flags: SendFlags,
    check: Check,
    release: Vec<Slot>,
    /// The message that the receiver will see, and the number of its queue pair.
    message: Option<(usize, Message)>,
    len: usize,
    ud: Option<UdDest>,
}

impl Draft {
    fn new(op: SendOp, sges: Vec<Sge>, len: usize) -> Self {
        Self {
            op,
            sges,
            flags: SendFlags::empty(),
            check: Check::Nothing,
            release: Vec::new(),
            message: None,
            len,
            ud: None,
        }
    }
}

/// Data to send: its place and its bytes.
struct Data {
    sges: Vec<Sge>,
    bytes: Vec<u8>,
    inline: bool,
}

impl World {
    fn len(&mut self, q: usize) -> usize {
        let mtu = self.qps[q].options.mtu.bytes() as usize;
        let max = self.config.max_len;
        let len = match self.rng.random_range(0..10) {
            0 => 0,
            1 => self.rng.random_range(1..9),
            2..5 => self.rng.random_range(0..=2 * mtu),
            5 => mtu * self.rng.random_range(1..4) + self.rng.random_range(0..3) - 1,
            _ => self.rng.random_range(0..=max),
        };
        let max = if self.qps[q].qp_type() == QpType::Ud { max.min(4096) } else { max };
        len.min(max)
    }

    /// `len` bytes of noise, gathered or inline.
    fn data(&mut self, q: usize, len: usize) -> Data {
        self.data_in(q, len, 4)
    }

    /// The same in at most so many elements.
    fn data_in(&mut self, q: usize, len: usize, most: usize) -> Data {
        let qp = &self.qps[q];
        let host = &self.hosts[qp.host];
        if len <= qp.max_inline && self.rng.random_bool(0.5) {
            let bytes: Vec<u8> = (0..len).map(|_| self.rng.random()).collect();
            self.sim.write(host.scratch, 0, &bytes);
            let mut at = 0;
            let pieces = cut(&mut self.rng, len, most).into_iter().map(|len| {
                at += len;
                Sge { lkey: 0, ..host.scratch.sge(at - len, len) }
            });
            return Data { sges: pieces.collect(), bytes, inline: true };
        }
        let mut bytes = Vec::new();
        let mut sges = Vec::new();
        for len in cut(&mut self.rng, len, most) {
            let at = self.rng.random_range(0..=host.source.len - len);
            bytes.extend(&host.source_bytes[at..at + len]);
            sges.push(host.source.sge(at, len));
        }
        Data { sges, bytes, inline: false }
    }

    /// A random request on a queue pair; nothing if there is no buffer for it.
    pub(crate) fn post_random(&mut self, q: usize) {
        if self.qps[q].qp_type() == QpType::Rc && self.rng.random_bool(self.config.lanes * 0.6) {
            let draft = self.short_send(q);
            return self.post(q, draft);
        }
        let len = self.len(q);
        let draft = match self.qps[q].qp_type() {
            QpType::Ud => Some(self.datagram(q, len)),
            QpType::Uc => match self.rng.random_range(0..4) {
                0 => self.write(q, len),
                1 => Some(self.local_inv(q)),
                _ => Some(self.message(q, len)),
            },
            QpType::XrcRecv => None,
            QpType::Rc | QpType::XrcSend => match self.rng.random_range(0..12) {
                0..3 => Some(self.message(q, len)),
                3..6 => self.write(q, len),
                6..8 => {
                    let read = self.read(q, len);
                    let fenced = self.rng.random_bool(0.3);
                    match read {
                        Some(read) if fenced => {
                            self.read_and_send(q, read);
                            return;
                        }
                        read => read,
                    }
                }
                8 => self.fetch_add(q),
                9 => Some(self.atomic_write(q)),
                10 => Some(self.local_inv(q)),
                _ => self.compare_swap(q),
            },
        };
        if let Some(draft) = draft {
            self.post(q, draft);
        }
    }

    fn imm(&mut self) -> u32 {
        self.next_imm += 1;
        self.next_imm
    }

    fn to_receiver(&self, q: usize, opcode: WcOpcode, bytes: Vec<u8>) -> Message {
        let from = self.qps[q].qpn;
        Message { opcode, bytes, at: 0, imm: None, inv: None, srq: None, from, received: 0 }
    }

    /// A SEND of any kind.
    fn message(&mut self, q: usize, len: usize) -> Draft {
        let data = self.data(q, len);
        let peer = self.qps[q].peer;
        let mut message = self.to_receiver(q, WcOpcode::Recv, data.bytes);
        let op = match self.rng.random_range(0..10) {
            0 if self.qps[q].is_reliable() => {
                let to = &self.hosts[self.qps[peer].host];
                let (device, pd) = (to.device, to.pd);
                let addr = self.qps[peer].board.addr;
                let mr = self.sim.register(device, pd, addr, 8, Access::INVALIDATABLE);
                message.inv = Some(mr.rkey);
                SendOp::SendInv(mr.rkey)
            }
            1..5 => SendOp::Send,
            _ => {
                let imm = self.imm();
                message.imm = Some(imm);
                SendOp::SendImm(imm)
            }
        };
        let mut draft = Draft::new(op, data.sges, len);
        draft.flags.set(SendFlags::INLINE, data.inline);
        draft.message = Some((peer, message));
        draft
    }

    /// A SEND that may take a lane.
    fn short_send(&mut self, q: usize) -> Draft {
        let len = self.rng.random_range(0..=48);
        let data = self.data_in(q, len, 1);
        let message = self.to_receiver(q, WcOpcode::Recv, data.bytes);
        let mut draft = Draft::new(SendOp::Send, data.sges, len);
        draft.flags.set(SendFlags::INLINE, data.inline);
        draft.message = Some((self.qps[q].peer, message));
        draft
    }

    fn datagram(&mut self, q: usize, len: usize) -> Draft {
        let others: Vec<usize> = (0..self.qps.len())
            .filter(|i| self.qps[*i].qp_type() == QpType::Ud && !self.qps[*i].destroyed)
            .collect();
        let to = *others.choose(&mut self.rng).unwrap_or(&q);
        let data = self.data(q, len);
        let mut message = self.to_receiver(q, WcOpcode::Recv, data.bytes);
        let imm = self.imm();
        message.imm = Some(imm);
        let mut draft = Draft::new(SendOp::SendImm(imm), data.sges, len);
        draft.flags.set(SendFlags::INLINE, data.inline);
        draft.ud = Some(self.sim.dest(self.qps[q].id, self.qps[to].id));
        draft.message = Some((to, message));
        draft
    }

    /// A WRITE, with immediate data or without.
    fn write(&mut self, q: usize, len: usize) -> Option<Draft> {
        let peer = self.qps[q].peer;
        let room = self.qps[peer].board_len();
        let at = if self.qps[q].is_reliable() {
            let at = self.rng.random_range(0..=room - len);
            let pinned =
                |(_, pin): &(u64, std::ops::Range<usize>)| pin.start < at + len && at < pin.end;
            if self.qps[q].pins.iter().any(pinned) {
                return None;
            }
            at
        } else {
            let at = self.qps[q].written_up_to;
            if at + len > room {
                return None;
            }
            self.qps[q].written_up_to += len;
            self.qps[q].written.push(at..at + len);
            at
        };
        let data = self.data(q, len);
        self.qps[q].shadow[at..at + len].copy_from_slice(&data.bytes);
        let target = self.qps[peer].board.remote(at);
        let mut draft = Draft::new(SendOp::Write(target), data.sges, len);
        if self.rng.random_bool(0.4) {
            let imm = self.imm();
            let mut message = self.to_receiver(q, WcOpcode::RecvRdmaWithImm, data.bytes);
            message.imm = Some(imm);
            message.at = at;
            draft.op = SendOp::WriteImm(target, imm);
            draft.message = Some((peer, message));
        }
        draft.flags.set(SendFlags::INLINE, data.inline);
        Some(draft)
    }

    fn take_slot(&mut self, q: usize, len: usize) -> Option<Slot> {
        let host = &mut self.hosts[self.qps[q].host];
        host.slots.take(&mut self.rng, len, 4)
    }

    fn read(&mut self, q: usize, len: usize) -> Option<Draft> {
        let slot = self.take_slot(q, len)?;
        let qp = &mut self.qps[q];
        let at = self.rng.random_range(0..=qp.shadow.len() - len);
        qp.pins.push((qp.next_wr_id, at..at + len));
        let expected = qp.shadow[at..at + len].to_vec();
        let from = self.qps[self.qps[q].peer].board.remote(at);
        let mut draft = Draft::new(SendOp::Read(from), slot.sges.clone(), len);
        draft.check = Check::Read(slot.clone(), expected);
        draft.release.push(slot);
        Some(draft)
    }

    /// A READ, and a fenced SEND of the bytes that it brings.
    fn read_and_send(&mut self, q: usize, mut read: Draft) {
        let Check::Read(slot, bytes) = read.check.clone() else { unreachable!("it is a READ") };
        if self.qps[q].max_send_wr - self.qps[q].sends.len() < 2 {
            self.post(q, read);
            return;
        }
        // The buffer is in use until the SEND is done as well.
        read.release.clear();
        self.post(q, read);
        let message = self.to_receiver(q, WcOpcode::Recv, bytes);
        let mut send = Draft::new(SendOp::Send, slot.sges.clone(), message.bytes.len());
        send.message = Some((self.qps[q].peer, message));
        send.flags |= SendFlags::FENCE;
        send.release.push(slot);
        self.post(q, send);
    }

    fn fetch_add(&mut self, q: usize) -> Option<Draft> {
        let slot = self.take_slot(q, 8)?;
        let host = self.qps[self.qps[q].peer].host;
        let counter = self.rng.random_range(0..COUNTERS);
        let at = self.hosts[host].counters.remote(counter * 8);
        let add = self.rng.random_range(1..1000);
        let mut draft = Draft::new(SendOp::FetchAdd { at, add }, slot.sges.clone(), 8);
        draft.check = Check::Added { slot: slot.clone(), host, counter, add };
        draft.release.push(slot);
        Some(draft)
    }

    fn compare_swap(&mut self, q: usize) -> Option<Draft> {
        let slot = self.take_slot(q, 8)?;
        let theirs = &self.qps[self.qps[q].peer];
        let at = theirs.board.remote(theirs.board_len());
        let old = self.qps[q].word;
        let compare = if self.rng.random_bool(0.7) { old } else { self.rng.random() };
        let swap = self.rng.random();
        let mut draft = Draft::new(SendOp::CompareSwap { at, compare, swap }, slot.sges.clone(), 8);
        draft.check = Check::Swapped(slot.clone(), old);
        draft.release.push(slot);
        Some(draft)
    }

    /// An ATOMIC WRITE of the word that only this queue pair changes.
    fn atomic_write(&mut self, q: usize) -> Draft {
        let theirs = &self.qps[self.qps[q].peer];
        let at = theirs.board.remote(theirs.board_len());
        let data = Some(self.rng.random::<u64>().to_ne_bytes());
        Draft::new(SendOp::AtomicWrite { at, data }, vec![], 0)
    }

    /// A LOCAL_INV of a key that lives for this alone: done twice, it would fail.
    fn local_inv(&mut self, q: usize) -> Draft {
        let own = &self.hosts[self.qps[q].host];
        let (device, pd, addr) = (own.device, own.pd, own.source.addr);
        let mr = self.sim.register(device, pd, addr, 8, Access::INVALIDATABLE);
        Draft::new(SendOp::LocalInv(mr.rkey), vec![], 0)
    }

    /// Something that must fail; the connection is broken by it.
    pub(crate) fn post_bad(&mut self, q: usize) {
        let peer = self.qps[q].peer;
        let len = self.rng.random_range(1..=self.config.max_len);
        let nowhere = RemoteAddr { va: 0, rkey: 0 };
        let beyond = self.qps[peer].board.remote(self.qps[peer].board.len - len / 2);
        let data = self.data(q, len);
        let Some(bytes) = data.sges.first().copied() else { return };
        let bad_key = vec![Sge { lkey: 0, len: bytes.len.max(1), ..bytes }];
        let reliable = self.qps[q].is_reliable();
        let mut draft = match self.rng.random_range(0..4) {
            0 if reliable => Draft::new(SendOp::Write(nowhere), data.sges, len),
            1 if reliable => Draft::new(SendOp::Write(beyond), data.sges, len),
            2 if reliable => {
                // Longer than any receive.
                let sge = self.hosts[self.qps[q].host].source.sge(0, self.config.max_len + 100);
                Draft::new(SendOp::Send, vec![sge], 0)
            }
            _ => Draft::new(SendOp::Send, bad_key, 0),
        };
        let inline = data.inline && matches!(draft.op, SendOp::Write(_));
        draft.flags.set(SendFlags::INLINE, inline);
        if self.qps[q].qp_type() == QpType::Ud {
            draft.ud = Some(self.sim.dest(self.qps[q].id, self.qps[q].id));
        }
        self.break_connection(q);
        self.post(q, draft);
    }

    /// Anything may happen to this connection from now on.
    pub(crate) fn break_connection(&mut self, q: usize) {
        let peer = self.qps[q].peer;
        self.qps[q].broken = true;
        self.qps[peer].broken = true;
    }

    /// A signaled request of no bytes, if the last one was not signaled: completes all before it.
    pub(crate) fn post_last(&mut self, q: usize) {
        if self.qps[q].sends.back().is_none_or(|send| send.signaled) {
            return;
        }
        let mut draft = match self.qps[q].qp_type() {
            QpType::Ud => self.datagram(q, 0),
            _ => Draft::new(SendOp::Write(RemoteAddr { va: 0, rkey: 0 }), vec![], 0),
        };
        draft.flags |= SendFlags::SIGNALED;
        self.post(q, draft);
    }

    fn post(&mut self, q: usize, mut draft: Draft) {
        let qp = &self.qps[q];
        let used = qp.sends.len();
        let full = used == qp.max_send_wr;
        // An unsignaled request in the last slot would never give it back.
        if self.rng.random_bool(0.5) || used + 1 >= qp.max_send_wr {
            draft.flags |= SendFlags::SIGNALED;
        }
        if draft.len > 0 && self.rng.random_bool(0.05) {
            draft.flags |= SendFlags::FENCE;
        }
        draft.flags.set(SendFlags::SOLICITED, self.rng.random_bool(0.2));
        let wr_id = qp.next_wr_id;
        let mut xrc_srqn = 0;
        if qp.qp_type() == QpType::XrcSend {
            let srqs = &self.hosts[self.qps[qp.peer].host].xrc;
            let srq = self.rng.random_range(0..srqs.len());
            xrc_srqn = self.sim.srqn(srqs[srq].id);
            if let Some((_, message)) = &mut draft.message {
                message.srq = Some(srq);
            }
        }
        let wr = SendWr {
            wr_id,
            op: draft.op,
            flags: draft.flags,
            sges: &draft.sges,
            ud: draft.ud,
            xrc_srqn,
        };
        let posted = self.sim.queue_send(qp.id, &wr);
        if draft.flags.contains(SendFlags::INLINE) {
            // The data was copied, so later contents of the buffer do not matter.
            self.sim.fill(self.hosts[qp.host].scratch, wr_id);
        }
        assert_eq!(posted, if full { Err(PostSendError::Full) } else { Ok(()) });
        if full {
            panic!("the caller looks whether there is room");
        }
        let qp = &mut self.qps[q];
        if let SendOp::CompareSwap { compare, swap, .. } = draft.op
            && compare == qp.word
        {
            qp.word = swap;
        }
        if let SendOp::AtomicWrite { data: Some(data), .. } = draft.op {
            qp.word = u64::from_ne_bytes(data);
        }
        let message = draft.message.map(|(to, message)| {
            self.qps[to].messages.push(message);
            self.qps[to].messages.len() - 1
        });
        let qp = &mut self.qps[q];
        qp.next_wr_id += 1;
        qp.sends.push_back(Send {
            wr_id,
            signaled: draft.flags.contains(SendFlags::SIGNALED) || qp.options.sq_sig_all,
            opcode: match draft.op {
                SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => WcOpcode::Send,
                SendOp::Write(_) | SendOp::WriteImm(..) => WcOpcode::RdmaWrite,
                SendOp::Read(_) => WcOpcode::RdmaRead,
                SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
                SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
                SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
                SendOp::Flush { .. } => WcOpcode::Flush,
                SendOp::BindMw(_) => WcOpcode::BindMw,
                SendOp::LocalInv(_) => WcOpcode::LocalInv,
            },
            len: draft.len,
            check: draft.check,
            release: draft.release,
            message,
        });
    }

    /// A message that has to arrive at its peer, which is itself for datagrams.
    pub(crate) fn post_probe(&mut self, q: usize) {
        let to = self.qps[q].peer;
        let imm = self.imm();
        let mut draft = Draft::new(SendOp::SendImm(imm), vec![], 0);
        if self.qps[q].qp_type() == QpType::Ud {
            draft.ud = Some(self.sim.dest(self.qps[q].id, self.qps[to].id));
        }
        let mut message = self.to_receiver(q, WcOpcode::Recv, vec![]);
        message.imm = Some(imm);
        draft.message = Some((to, message));
        draft.flags |= SendFlags::SIGNALED;
        self.post(q, draft);
    }

    /// A full queue refuses.
    pub(crate) fn post_to_full(&mut self, q: usize) {
        let qp = &self.qps[q];
        let ud = (qp.qp_type() == QpType::Ud).then(|| self.sim.dest(qp.id, qp.id));
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: u64::MAX, op: SendOp::Send, flags, sges: &[], ud, xrc_srqn: 0 };
        let refused = match qp.qp_type() {
            QpType::XrcRecv => PostSendError::NoSendQueue,
            _ => PostSendError::Full,
        };
        assert_eq!(self.sim.queue_send(qp.id, &wr), Err(refused));
    }

    /// Posts a receive that holds any message, if there is room and a buffer.
    pub(crate) fn post_recv(&mut self, q: usize) -> bool {
        match self.qps[q].qp_type() {
            QpType::XrcSend => return false,
            QpType::XrcRecv => {
                let host = self.qps[q].host;
                let srqs = 0..self.hosts[host].xrc.len();
                return srqs.filter(|srq| self.post_xrc_recv(host, *srq)).count() > 0;
            }
            _ => {}
        }
        let World { sim, rng, qps, hosts, config, .. } = self;
        let qp = &mut qps[q];
        let host = &mut hosts[qp.host];
        if qp.destroyed || (!qp.on_srq && qp.recvs.len() >= qp.max_recv_wr) {
            return false;
        }
        let Some(slot) = host.slots.take(rng, config.max_len + 40, 4) else { return false };
        host.next_recv += 1;
        let wr = RecvWr { wr_id: host.next_recv, sges: &slot.sges };
        match host.srq {
            Some(srq) if qp.on_srq => {
                // Some receives that are not complete may have been taken already, so only an upper bound is known.
                let full = sim.post_srq_recv(srq, &wr).is_err();
                if full {
                    assert!(host.srq_recvs.len() >= host.srq_max);
                    host.slots.release(sim, &slot);
                    return false;
                }
            }
            _ => assert_eq!(sim.post_recv(qp.id, &wr), Ok(())),
        }
        if qp.on_srq {
            host.srq_recvs.insert(wr.wr_id, slot);
        } else {
            qp.recvs.push_back((wr.wr_id, slot));
        }
        true
    }

    /// Posts a receive to a shared queue of type XRC.
    fn post_xrc_recv(&mut self, h: usize, srq: usize) -> bool {
        let World { sim, rng, hosts, config, .. } = self;
        let Host { slots, xrc, next_recv, .. } = &mut hosts[h];
        let srq = &mut xrc[srq];
        let Some(slot) = slots.take(rng, config.max_len + 40, 4) else { return false };
        *next_recv += 1;
        let wr = RecvWr { wr_id: *next_recv, sges: &slot.sges };
        if sim.post_srq_recv(srq.id, &wr).is_err() {
            assert!(srq.recvs.len() >= srq.max);
            slots.release(sim, &slot);
            return false;
        }
        srq.recvs.insert(wr.wr_id, slot);
        true
    }
}
