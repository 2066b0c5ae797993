//! Measures the cost of a packet before and after its queue pair sees it.

use std::collections::VecDeque;
use std::hint::black_box;
use std::net::Ipv4Addr;

use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::icrc::{Flow, IcrcVerdict};
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN, Packet};
use anyverbs_proto::wire::reth::Reth;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn flow() -> Flow {
    let (src, dst) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    Flow::new(src.into(), dst.into(), 0xc123, 4791)
}

fn headers(operation: Operation) -> Headers {
    Headers::new(Bth::new(Opcode::new(Service::Rc, operation), Qpn::new(0x0a_0001), Psn::new(17)))
}

fn bytes_of(packet: &Packet<'_>) -> Vec<u8> {
    let mut bytes = vec![0; packet.len()];
    packet.emit(&mut bytes);
    bytes
}

/// The checksum of a MIDDLE packet, by payload; `crc32fast` over the same bytes is the bare minimum.
fn icrc(c: &mut Criterion) {
    for payload in [4, 64, 256, 1024, 4096] {
        let payload = vec![0x5a; payload];
        let bytes = bytes_of(&Packet::new(headers(Operation::SendMiddle), &payload));
        let flow = flow();
        let with_icrc = |id| [&bytes[..], &flow.compute(id, &bytes).to_le_bytes()].concat();
        let (exact, other_id) = (with_icrc(0), with_icrc(77));
        let mut wrong = exact.clone();
        wrong[9] ^= 1;

        let mut group = c.benchmark_group(format!("icrc/{}", payload.len()));
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function("crc32fast", |b| b.iter(|| crc32fast::hash(black_box(&bytes))));
        group.bench_function("compute", |b| b.iter(|| flow.compute(0, black_box(&bytes))));
        group.bench_function("check_exact", |b| b.iter(|| flow.check(black_box(&exact), 0)));
        group.bench_function("check_some_id", |b| b.iter(|| flow.check(black_box(&other_id), 0)));
        group.bench_function("check_wrong", |b| b.iter(|| flow.check(black_box(&wrong), 0)));
        group.finish();
        assert_eq!(flow.check(&other_id, 0), IcrcVerdict::SomeId(77));
        assert_eq!(flow.check(&wrong, 0), IcrcVerdict::Wrong);
    }
    c.bench_function("icrc/new_flow", |b| b.iter(|| black_box(flow())));
}

/// Parse and emit, by kind of packet; the payload of 1024 bytes is copied by `emit_packet` alone.
fn packet(c: &mut Criterion) {
    let payload = [0x5a; 1024];
    let write = Headers {
        reth: Some(Reth { va: 0x7fff_0000_1000, rkey: 0x1234, len: 65536 }),
        ..headers(Operation::WriteFirst)
    };
    let ack =
        Headers { aeth: Some(Aeth { syndrome: Syndrome::ACK, msn: 9 }), ..headers(Operation::Ack) };
    let cases = [
        ("send_middle", Packet::new(headers(Operation::SendMiddle), &payload)),
        ("write_first", Packet::new(write, &payload)),
        ("ack", Packet::new(ack, &[])),
    ];
    for (name, packet) in cases {
        let bytes = bytes_of(&packet);
        let mut out = vec![0; packet.len() + ICRC_LEN];
        let mut group = c.benchmark_group(name);
        group.bench_function("parse", |b| {
            // A receiver looks at the packet where it lies.
            b.iter(|| {
                let packet = Packet::parse(black_box(&bytes));
                black_box(&packet).is_ok()
            })
        });
        group.bench_function("emit_headers", |b| {
            b.iter(|| black_box(&packet.headers).emit(black_box(&mut out)))
        });
        group.bench_function("emit_packet", |b| {
            b.iter(|| black_box(&packet).emit(black_box(&mut out)))
        });
        group.finish();
    }
}

/// Packets of one call.
const CALL: u32 = 16;

/// A link that writes headers, as every link does. The call is not inlined, since no link is: each is far too long.
#[derive(Default)]
struct Link {
    out: Vec<[u8; 64]>,
}

impl Link {
    #[inline(never)]
    fn transmit(&mut self, headers: &Headers, payload: (u32, u32, u32)) {
        let room = &mut self.out[headers.bth.psn.get() as usize % CALL as usize];
        headers.emit(&mut room[..]);
        black_box(payload);
    }
}

fn nth(n: u32) -> Headers {
    let mut headers = headers(Operation::SendMiddle);
    headers.bth.psn = Psn::new(n);
    headers
}

/// The machine calls the link for each packet.
#[inline(never)]
fn by_call(link: &mut Link) {
    for n in 0..black_box(CALL) {
        link.transmit(&nth(n), (n, 1024 * n, 1024));
    }
}

/// The machine puts packets into a queue, and whoever called it takes them out. A packet is its headers, and the place of
/// its payload in the send queue: WQE, offset, length.
#[inline(never)]
fn by_queue(link: &mut Link, queue: &mut VecDeque<(Headers, (u32, u32, u32))>) {
    for n in 0..black_box(CALL) {
        queue.push_back((nth(n), (n, 1024 * n, 1024)));
    }
    while let Some((headers, payload)) = queue.pop_front() {
        link.transmit(&headers, payload);
    }
}

/// The two ways for packets from the machine to a link. `ARCHITECTURE.md` has what they cost.
fn hand_over(c: &mut Criterion) {
    let mut link = Link { out: vec![[0; 64]; CALL as usize] };
    let mut queue = VecDeque::with_capacity(CALL as usize);
    let mut group = c.benchmark_group("hand_over");
    group.throughput(Throughput::Elements(CALL.into()));
    group.bench_function("by_call", |b| b.iter(|| by_call(black_box(&mut link))));
    group.bench_function("by_queue", |b| b.iter(|| by_queue(black_box(&mut link), &mut queue)));
    group.finish();
}

criterion_group!(benches, icrc, packet, hand_over);
criterion_main!(benches);
