//! Tag matching over a network that loses packets (`ibv_post_srq_ops(3)`): a match goes to its buffer once, and the
//! sender of a rendezvous is told once.

use super::prelude::*;
use anyverbs_proto::tag_list::TagAdd;
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wire::tmh::{Rvh, TmOp, Tmh};
use anyverbs_sim::{CqId, Mr, QpId, SrqId};

const TAGS: u64 = 40;
const EACH: usize = 8192;

/// A sender on one device. On the other, a queue pair with an SRQ that matches tags.
struct World {
    sim: Sim,
    sender: QpId,
    matcher: QpId,
    srq: SrqId,
    send_cq: CqId,
    recv_cq: CqId,
    from: Mr,
    to: Mr,
}

fn world(seed: u64, options: &QpOptions) -> World {
    let mut sim = Sim::new(seed);
    let (x, y) = (sim.device(), sim.device());
    let (pd_x, pd_y) = (sim.pd(x), sim.pd(y));
    let (send_cq, recv_cq) = (sim.cq(x, 1000), sim.cq(y, 1000));
    let srq = sim.tm_srq(y, 64, 1, 64);
    let len = TAGS as usize * EACH;
    let (from, to) = (sim.mr(x, pd_x, 2 * len, Access::VERBS), sim.mr(y, pd_y, len, Access::VERBS));
    sim.fill(from, 1);
    let sender = sim.qp(pd_x, send_cq, send_cq, None, options);
    let matcher = sim.qp(pd_y, recv_cq, recv_cq, Some(srq), options);
    sim.connect((sender, options), (matcher, options));
    World { sim, sender, matcher, srq, send_cq, recv_cq, from, to }
}

impl World {
    fn add(&mut self, tag: u64) {
        let sges = [self.to.sge(tag as usize * EACH, EACH)];
        let add = TagAdd { wr_id: tag, sges: &sges, tag, mask: !0 };
        self.sim.tags(self.srq).as_mut().unwrap().add(&add).unwrap();
    }

    /// Sends a message with its header in front of its place in the second half of the region.
    fn send(&mut self, op: TmOp, tag: u64, len: usize) {
        let at = (TAGS as usize + tag as usize) * EACH;
        let mut header = [0; Tmh::LEN];
        Tmh { op, user_data: 7, tag }.emit(&mut header);
        self.sim.write(self.from, at, &header);
        let bytes = if op == TmOp::Rndv {
            let data = self.from.remote(tag as usize * EACH);
            let mut header = [0; Rvh::LEN];
            Rvh { va: data.va, rkey: data.rkey, len: len as u32 }.emit(&mut header);
            self.sim.write(self.from, at + Tmh::LEN, &header);
            Tmh::LEN + Rvh::LEN
        } else {
            let data = self.sim.bytes(self.from, tag as usize * EACH, len);
            self.sim.write(self.from, at + Tmh::LEN, &data);
            Tmh::LEN + len
        };
        let sges = [self.from.sge(at, bytes)];
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: tag, op: SendOp::Send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
        self.sim.post_send(self.sender, &wr).unwrap();
    }

    fn polled(&mut self) -> Vec<Wc> {
        self.sim.poll(self.recv_cq)
    }
}

fn is_rndv(tag: u64) -> bool {
    tag % 3 == 1
}

fn len(tag: u64) -> usize {
    tag as usize * 997 % (EACH - Tmh::LEN - 1) + 1
}

#[test]
fn every_message_finds_its_buffer_once_despite_loss() {
    for (seed, segment) in [(1, 0), (2, 0), (3, 0), (4, 16384)] {
        let mut w = world(seed, &QpOptions { segment, timeout: 8, ..QpOptions::rc() });
        let loss = if segment == 0 { 0.05 } else { 0.0 };
        w.sim.net.default_link = Link { loss, duplicate: loss, ..Link::default() };
        for tag in 0..TAGS {
            w.add(TAGS - 1 - tag);
        }
        let fins: Vec<u64> = (0..TAGS).filter(|tag| is_rndv(*tag)).collect();
        let spare = [w.from.sge((2 * TAGS as usize - 1) * EACH + EACH - 32, 32)];
        for wr_id in &fins {
            w.sim.post_recv(w.sender, &RecvWr { wr_id: *wr_id, sges: &spare }).unwrap();
        }
        for tag in 0..TAGS {
            w.send(if is_rndv(tag) { TmOp::Rndv } else { TmOp::Eager }, tag, len(tag));
        }
        w.sim.run();
        let wcs = w.polled();
        for tag in 0..TAGS {
            let of_tag: Vec<_> = wcs.iter().filter(|wc| wc.wr_id == tag).collect();
            let flags: Vec<_> = of_tag.iter().map(|wc| wc.flags).collect();
            let (matched, valid) = (WcFlags::TM_MATCH, WcFlags::TM_DATA_VALID);
            assert!(flags == [matched, valid] || flags == [matched | valid], "{tag}: {of_tag:?}");
            assert!(of_tag.iter().all(|wc| wc.status == Success && wc.opcode == WcOpcode::TmRecv));
            assert_eq!(of_tag.last().unwrap().byte_len, len(tag) as u32);
            let place = tag as usize * EACH;
            assert_eq!(w.sim.bytes(w.to, place, len(tag)), w.sim.bytes(w.from, place, len(tag)));
        }
        // Matches come in the order in which messages were sent.
        let matches = wcs.iter().filter(|wc| wc.flags.contains(WcFlags::TM_MATCH));
        assert!(matches.map(|wc| wc.wr_id).eq(0..TAGS));
        let sent = w.sim.poll(w.send_cq);
        let told = sent.iter().filter(|wc| wc.opcode == WcOpcode::Recv);
        assert!(told.map(|wc| (wc.wr_id, wc.byte_len)).eq(fins.iter().map(|f| (*f, 32))));
        assert!(sent.iter().all(|wc| wc.status == Success));
    }
}

#[test]
fn a_message_without_a_buffer_waits_and_counts_once() {
    let mut w = world(1, &QpOptions::rc());
    w.send(TmOp::Eager, 5, 100);
    w.sim.run_for(Duration::from_millis(5));
    assert_eq!(w.polled(), []);
    let sges = [w.to.sge(0, 4096)];
    w.sim.post_srq_recv(w.srq, &RecvWr { wr_id: 9, sges: &sges }).unwrap();
    w.sim.run();
    let wcs = w.polled();
    assert_eq!((wcs.len(), wcs[0].wr_id, wcs[0].opcode), (1, 9, WcOpcode::TmRecv));
    assert_eq!((wcs[0].flags, wcs[0].byte_len), (WcFlags::empty(), 116));
    let tags = w.sim.tags(w.srq).as_mut().unwrap();
    tags.sync(1);
    assert!(tags.in_sync());
}

#[test]
fn a_rendezvous_under_way_is_flushed_to_its_tag() {
    let mut w = world(1, &QpOptions::rc());
    w.add(1);
    w.sim.net.once(is(O::ReadRequest), Fate::Drop);
    w.send(TmOp::Rndv, 1, 5000);
    w.sim.run_for(Duration::from_millis(1));
    w.sim.to_state(w.matcher, QpState::Err);
    w.sim.run();
    let got: Vec<_> = w.polled().iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect();
    assert_eq!(got, [(1, Success, WcOpcode::TmRecv), (1, WrFlushErr, WcOpcode::TmRecv)]);
}

#[test]
fn a_made_up_key_fails_the_tag_and_both_ends() {
    let mut w = world(1, &QpOptions::rc());
    w.add(1);
    w.from.rkey ^= 0xff00;
    w.send(TmOp::Rndv, 1, 500);
    w.sim.run();
    let got: Vec<_> = w.polled().iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(got, [(1, Success), (1, RemAccessErr)]);
    assert_eq!(w.sim.get(w.sender).state(), QpState::Err);
    assert_eq!(w.sim.get(w.matcher).state(), QpState::Err);
}

/// The program gets what the queue pair cannot fetch.
#[test]
fn a_rendezvous_without_reads_is_the_programs() {
    let mut w = world(1, &QpOptions { max_rd_atomic: 0, ..QpOptions::rc() });
    w.add(1);
    let sges = [w.to.sge(0, 4096)];
    w.sim.post_srq_recv(w.srq, &RecvWr { wr_id: 9, sges: &sges }).unwrap();
    w.send(TmOp::Rndv, 1, 500);
    w.sim.run();
    let got: Vec<_> = w.polled().iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(got, [(9, Success)]);
    assert_eq!(w.sim.get(w.sender).state(), QpState::Rts);
}
