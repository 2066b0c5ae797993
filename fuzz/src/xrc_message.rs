//! Messages of another process that shares an XRC domain, which may send anything. They are read as they were written
//! or not at all. A responder that was lent with any state, and the requests that are handed on to it, break nothing.

use std::time::Duration;

use anyverbs_proto::mr::Access;
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::attr::{QpAttr, QpType};
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::Mtu;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::atomic::{AtomicAckEth, AtomicEth};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::feth::Feth;
use anyverbs_proto::wire::opcode::Opcode;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wire::reth::Reth;
use anyverbs_proto::wire::xrceth::XrcEth;
use anyverbs_proto::wr::{RecvWr, SendOp};
use anyverbs_proto::xrc_message::{self, Message};
use anyverbs_sim::{Mr, PAGE, Pair, QpOptions};

use super::input::Input;

const MAX_STEPS: usize = 64;

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    if input.byte() & 3 == 0 {
        read(input.0);
    } else {
        Run::new(&mut input).go(input);
    }
}

/// Reads a message as it was written or not at all.
fn read(bytes: &[u8]) -> Option<Message> {
    // Whatever it is: no panic.
    let _ = xrc_message::parse_packet(bytes);
    let message = Message::parse(bytes)?;
    assert_eq!(Message::parse(&message.emit()).as_ref(), Some(&message));
    Some(message)
}

/// Changes some bytes.
fn spoil(bytes: &mut Vec<u8>, input: &mut Input<'_>) {
    for _ in 0..input.byte() % 6 {
        let at = usize::from(input.word()) % bytes.len();
        bytes[at] = match input.byte() {
            0..64 => 0xff,
            64..128 => bytes[at].wrapping_add(1),
            _ => input.byte(),
        };
    }
    if input.rarely() {
        bytes.truncate(usize::from(input.word()) % (bytes.len() + 1));
    }
}

struct Run {
    t: Pair,
    /// The target's region; the memory behind it must not be touched.
    mr: Mr,
    other: Mr,
}

impl Run {
    fn new(input: &mut Input<'_>) -> Self {
        let options = QpOptions {
            mtu: Mtu::ALL[usize::from(input.byte()) % 5],
            max_dest_rd_atomic: input.byte() % 8,
            ..QpOptions::xrc_send()
        };
        let target = QpOptions { qp_type: QpType::XrcRecv, srq: Some(64), ..options };
        let mut t = Pair::with(1, options, target);
        let (device, pd) = (t.b.device, t.b.pd);
        let mr = t.mr(device, pd, PAGE, Access::VERBS);
        let foreign = t.pd(device);
        let other = t.mr(device, foreign, PAGE, Access::VERBS);
        let sges = [mr.sge(0, 1024)];
        if let Some(srq) = t.b.srq {
            for wr_id in 0..8 {
                let _ = t.post_srq_recv(srq, &RecvWr { wr_id, sges: &sges });
            }
        }
        // Something to be remembered.
        let end = t.a;
        let sges = [end.mr.sge(0, 3000)];
        t.post(end, 1, SendOp::Read(mr.remote(0)), &sges);
        t.run();
        Self { t, mr, other }
    }

    fn go(&mut self, mut input: Input<'_>) {
        for _ in 0..MAX_STEPS {
            if input.is_empty() {
                break;
            }
            match input.byte() {
                0..100 => self.lend(&mut input),
                100..220 => self.hand_on(&mut input),
                _ => {
                    let micros = u64::from(input.byte()).pow(2);
                    self.t.run_for(Duration::from_micros(micros));
                }
            }
            let untouched = self.t.bytes(self.other, 0, PAGE);
            assert!(untouched.iter().all(|byte| *byte == 0), "memory of another domain");
        }
        self.t.run_for(Duration::from_secs(1));
    }

    /// The responder comes back with a spoilt state.
    fn lend(&mut self, input: &mut Input<'_>) {
        let target = self.t.b.qp;
        let Some((attr, state)) = self.t.lease(target) else { return };
        let qpn = self.t.get(target).qpn();
        // The simulation knows no other addresses.
        let av = attr.av;
        let message = Message::Lend { target: qpn, lease: 1, domain: (1, 2), attr, state };
        let mut bytes = message.emit();
        spoil(&mut bytes, input);
        if let Some(Message::Lend { attr, state, .. }) = read(&bytes) {
            self.t.put_responder(target, &QpAttr { av, ..attr }, &state);
        }
    }

    /// A request that was spoilt on its way.
    fn hand_on(&mut self, input: &mut Input<'_>) {
        let service = QpType::XrcRecv.service();
        let send = Opcode::new(service, anyverbs_proto::wire::opcode::Operation::SendFirst);
        let Some(opcode) = Opcode::parse(send.code() & 0xe0 | input.byte() & 0x1f) else { return };
        let target = self.t.b.qp;
        let (qpn, progress) = (self.t.get(target).qpn(), self.t.get(target).progress().0);
        let back = u32::from(input.byte() % 8);
        let psn = progress.plus(0u32.wrapping_sub(back));
        let mut headers = Headers::new(Bth::new(opcode, qpn, psn));
        let mr = if input.rarely() { self.other } else { self.mr };
        let va = mr.addr + u64::from(input.word()) % PAGE as u64;
        headers.reth = Some(Reth { va, rkey: mr.rkey, len: u32::from(input.word()) });
        headers.atomic = Some(AtomicEth { va, rkey: mr.rkey, swap_add: 1, compare: 0 });
        headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
        headers.atomic_ack = Some(AtomicAckEth { original: 5 });
        headers.ieth = Some(mr.rkey);
        headers.feth = Some(Feth::parse(&[0, 0, 0, input.byte()]));
        headers.imm = Some(7);
        let srqn = self.t.b.srq.map_or(1, |srq| self.t.srqn(srq));
        headers.xrceth = Some(XrcEth { srqn });
        let mtu = self.t.get(target).attr().path_mtu.bytes() as usize;
        let len = input.len(mtu).min(8192);
        let payload = vec![0x5a; if opcode.admits_payload(len) { len } else { 0 }];
        let attr = self.t.get(target).attr();
        let arrival = Arrival {
            source: attr.av.dgid,
            destination: attr.av.sgid,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            interface: 0,
            port: 0,
        };
        let packets = u32::from(input.byte() % 9);
        let packet = Incoming { headers, payload: Data::Bytes(&payload), packets, acks: None };
        let Some(mut bytes) = self.t.handed_on(target, &arrival, &packet) else { return };
        spoil(&mut bytes, input);
        if let Some((_, arrival, packet)) = xrc_message::parse_packet(&bytes) {
            self.t.receive_handed_on(target, &arrival, &packet);
        }
    }
}
