//! The oracle's checks of completions.

use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::wc::{Wc, WcFlags, WcOpcode, WcStatus};
use anyverbs_sim::CqId;

use crate::slots::Slot;
use crate::world::{Check, Send, World};

impl World {
    /// Polls up to `most` completions and checks each.
    pub(crate) fn poll(&mut self, cq: CqId, most: usize) {
        for wc in self.sim.poll_some(cq, most) {
            self.log.push((wc.wr_id, wc.status as u8, wc.qpn.get()));
            let q = self.qps.iter().position(|qp| qp.qpn == wc.qpn);
            let q = q.unwrap_or_else(|| panic!("a completion of nobody: {wc:?}"));
            // Completions of a target's receives are the SRQ's.
            let target = self.qps[q].qp_type() == QpType::XrcRecv;
            assert!(target || !self.qps[q].destroyed, "a completion of a destroyed queue pair");
            if wc.opcode.is_recv() {
                assert!(target || cq == self.qps[q].recv_cq);
                self.received(q, &wc, cq);
            } else {
                assert_eq!(cq, self.qps[q].send_cq);
                self.sent(q, &wc);
            }
        }
    }

    pub(crate) fn poll_all(&mut self) {
        for cq in self.cqs.clone() {
            self.poll(cq, usize::MAX);
        }
    }

    /// A send completed: so did all before it.
    fn sent(&mut self, q: usize, wc: &Wc) {
        let qp = &mut self.qps[q];
        let at = qp.sends.iter().position(|send| send.wr_id == wc.wr_id);
        let at = at.unwrap_or_else(|| panic!("completed twice, or never posted: {wc:?}"));
        let done: Vec<Send> = qp.sends.drain(..=at).collect();
        let (last, before) = done.split_last().expect("at least this one");
        for skipped in before {
            assert!(!skipped.signaled, "no completion of {skipped:?}, but {wc:?}");
            assert!(!qp.send_failed, "an error completes all, but not {skipped:?}");
        }
        if wc.status == WcStatus::Success {
            assert!(!qp.send_failed, "success after an error: {wc:?}");
            assert!(last.signaled, "nobody asked for {wc:?}");
            assert_eq!(wc.opcode, last.opcode);
            if matches!(last.check, Check::Read(..) | Check::Swapped(..) | Check::Added { .. }) {
                assert_eq!(wc.byte_len as usize, last.len);
            }
        } else {
            assert!(qp.broken, "{wc:?} of {last:?}");
            let first = !std::mem::replace(&mut qp.send_failed, true);
            assert!(first || wc.status == WcStatus::WrFlushErr, "the second error: {wc:?}");
        }
        let failed = usize::from(wc.status != WcStatus::Success);
        let succeeded = done.len() - failed;
        for (i, send) in done.into_iter().enumerate() {
            self.finish_send(q, send, i < succeeded);
        }
    }

    fn finish_send(&mut self, q: usize, send: Send, success: bool) {
        let World { sim, qps, hosts, added, .. } = self;
        let qp = &mut qps[q];
        let host = &hosts[qp.host];
        qp.pins.retain(|(wr_id, _)| *wr_id != send.wr_id);
        if success {
            if let Some(message) = send.message {
                qp.sent_messages = message + 1;
            }
            let word = |slot: &Slot| {
                let bytes = host.slots.contents(sim, slot, 8, false);
                u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))
            };
            match &send.check {
                Check::Nothing => {}
                Check::Read(slot, expected) => {
                    let got = host.slots.contents(sim, slot, expected.len(), false);
                    assert!(got == *expected, "{send:?} brought the wrong bytes");
                }
                Check::Swapped(slot, old) => assert_eq!(word(slot), *old, "{send:?}"),
                Check::Added { slot, host, counter, add } => {
                    let old = word(slot);
                    added.entry((*host, *counter)).or_default().push((old, *add));
                }
            }
        }
        let host = qp.host;
        for slot in &send.release {
            self.hosts[host].slots.release(&self.sim, slot);
        }
    }

    fn received(&mut self, q: usize, wc: &Wc, cq: CqId) {
        let qp = &mut self.qps[q];
        let host = &mut self.hosts[qp.host];
        let mut srq = None;
        let slot = if qp.qp_type() == QpType::XrcRecv {
            srq = host.xrc.iter().position(|srq| srq.recvs.contains_key(&wc.wr_id));
            let srq = srq.unwrap_or_else(|| panic!("twice, or never: {wc:?}"));
            let srq = &mut host.xrc[srq];
            assert_eq!(cq, srq.cq);
            srq.recvs.remove(&wc.wr_id).expect("it is there")
        } else if qp.on_srq {
            host.srq_recvs.remove(&wc.wr_id).unwrap_or_else(|| panic!("twice, or never: {wc:?}"))
        } else {
            let (wr_id, slot) =
                qp.recvs.pop_front().unwrap_or_else(|| panic!("no receive: {wc:?}"));
            assert_eq!(wr_id, wc.wr_id, "out of order");
            slot
        };
        if wc.status == WcStatus::Success {
            assert!(srq.is_some() || !qp.recv_failed, "success after an error: {wc:?}");
            self.check_message(q, wc, &slot, srq);
        } else {
            assert!(qp.broken, "{wc:?}");
            let first = !std::mem::replace(&mut qp.recv_failed, true);
            assert!(first || wc.status == WcStatus::WrFlushErr, "the second error: {wc:?}");
        }
        let host = self.qps[q].host;
        self.hosts[host].slots.release(&self.sim, &slot);
    }

    /// A receive must hold the next message of a reliable connection, or some message of an unreliable one.
    fn check_message(&mut self, q: usize, wc: &Wc, slot: &Slot, srq: Option<usize>) {
        let qp = &self.qps[q];
        let slots = &self.hosts[qp.host].slots;
        let grh = qp.grh();
        let len = wc.byte_len as usize;
        assert!(len >= grh);
        // Without acknowledgements the start of a lost message may lie behind the end of this one.
        let reused = !qp.is_reliable();
        let bytes = if wc.opcode == WcOpcode::Recv {
            slots.contents(&self.sim, slot, len, reused)[grh..].to_vec()
        } else {
            slots.contents(&self.sim, slot, 0, reused);
            Vec::new()
        };
        let fits = |m: &crate::world::Message| {
            let mut flags = WcFlags::empty();
            flags.set(WcFlags::WITH_IMM, m.imm.is_some());
            flags.set(WcFlags::WITH_INV, m.inv.is_some());
            flags.set(WcFlags::GRH, grh > 0);
            m.opcode == wc.opcode
                && m.srq == srq
                && flags == wc.flags
                && m.imm.or(m.inv).is_none_or(|imm| imm == wc.imm)
                && m.bytes.len() == len - grh
                && (wc.opcode != WcOpcode::Recv || m.bytes == bytes)
                && (grh == 0 || m.from == wc.src_qpn)
        };
        let at = if qp.is_reliable() {
            // Completion queues of several SRQs say nothing about the order between them.
            let is_next = |m: &crate::world::Message| m.srq == srq && m.received == 0;
            let mut rest = qp.messages[qp.next_message..].iter();
            let at = qp.next_message + rest.position(is_next).unwrap_or(0);
            let expected = qp.messages.get(at).unwrap_or_else(|| panic!("never sent: {wc:?}"));
            assert!(fits(expected), "{wc:?} instead of {expected:?}, bytes {bytes:?}");
            at
        } else {
            // If several are alike, the likely one: in order, and not received yet.
            let candidates = || (0..qp.messages.len()).filter(|i| fits(&qp.messages[*i]));
            let at = candidates().min_by_key(|i| (qp.messages[*i].received, *i < qp.next_message));
            at.unwrap_or_else(|| panic!("never sent, or not like that: {wc:?}, bytes {bytes:?}"))
        };
        let link = &self.config.link;
        let (may_repeat, may_overtake) = (link.duplicate > 0.0, link.reorder > 0.0);
        let qp = &mut self.qps[q];
        qp.messages[at].received += 1;
        assert!(may_repeat || qp.messages[at].received == 1, "received twice: {wc:?}");
        if qp.qp_type() != QpType::Ud && !may_repeat && !may_overtake {
            assert!(at >= qp.next_message, "out of order: {wc:?}");
        }
        if srq.is_none() {
            qp.next_message = at + 1;
        }
        while qp.messages.get(qp.next_message).is_some_and(|m| srq.is_some() && m.received > 0) {
            qp.next_message += 1;
        }
        let message = &qp.messages[at];
        if wc.opcode == WcOpcode::RecvRdmaWithImm && qp.qp_type() == QpType::Uc {
            // Each range is written once, so data that arrived stays.
            let there = self.sim.bytes(qp.board, message.at, message.bytes.len()) == message.bytes;
            assert!(there, "a WRITE with immediate data without its data");
        }
    }
}
