//! Measures the cost of a message in the queues and in the table of memory keys, without a queue pair.

use std::hint::black_box;

use anyverbs_proto::cq::Cq;
use anyverbs_proto::mr::{Access, Keys, MrTable, Region};
use anyverbs_proto::recv_queue::{RecvQueue, RecvWqe};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{RecvWr, Sge};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};

const PD: u32 = 7;
const QPN: Qpn = Qpn::new(1);
const LEN: u64 = 4096;

/// Completions in and out, by how many a program polls at a time.
fn completion_queue(c: &mut Criterion) {
    let mut group = c.benchmark_group("cq");
    for batch in [1usize, 16, 256] {
        let mut cq = Cq::new(256);
        let mut out = vec![Wc::default(); batch];
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(format!("push_and_poll/{batch}"), |b| {
            b.iter(|| {
                for wr_id in 0..batch as u64 {
                    let wc = black_box((Wc { wr_id, ..Wc::default() }, false));
                    assert!(cq.push_plain(&[wc]));
                }
                assert_eq!(cq.poll(black_box(&mut out)), batch);
            });
        });
    }
    let mut cq = Cq::new(256);
    let mut out = vec![Wc::default(); 16];
    group.throughput(Throughput::Elements(1));
    group.bench_function("poll_empty", |b| b.iter(|| cq.poll(black_box(&mut out))));
    group.finish();
}

/// A receive posted and taken, by its elements.
fn receive_queue(c: &mut Criterion) {
    let mut group = c.benchmark_group("recv_queue");
    for sges in [1usize, 4] {
        let mut queue = RecvQueue::new(256, 4);
        let list = vec![Sge { addr: 0x1000, len: 64, lkey: 1 }; sges];
        let mut wqe = RecvWqe::default();
        group.bench_function(format!("push_and_pop/{sges}"), |b| {
            b.iter(|| {
                let wr = RecvWr { wr_id: 1, sges: black_box(&list) };
                assert!(queue.push(&wr).is_ok());
                assert!(queue.pop(black_box(&mut wqe)));
            });
        });
    }
    group.finish();
}

/// The check of an access, by how many regions there are: each in turn, so that a large table misses the caches.
fn memory_keys(c: &mut Criterion) {
    let region = |n: u64| Region {
        pd: PD,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        iova: n * LEN,
        len: LEN,
        addr: n * LEN,
    };
    let mut group = c.benchmark_group("mr");
    for count in [1u64, 1_000, 100_000] {
        let table = MrTable::new(1 << 17, 1);
        let keys: Vec<Keys> =
            (1..=count).map(|n| table.register(region(n)).expect("there is room")).collect();
        let mut at = 0;
        group.bench_function(format!("remote/{count}"), |b| {
            b.iter(|| {
                // A step that visits all, far from one another.
                at = (at + 7919) % keys.len();
                let va = (at as u64 + 1) * LEN + 8;
                let hold =
                    table.remote(keys[at].rkey, (PD, QPN.get()), va, 64, Access::REMOTE_WRITE);
                black_box(hold.map(|hold| hold.addr()).ok())
            });
        });
        assert!(table.remote(keys[0].rkey, (PD, QPN.get()), LEN, 64, Access::REMOTE_WRITE).is_ok());
        assert!(
            table.remote(keys[0].lkey, (PD, QPN.get()), LEN, 64, Access::REMOTE_WRITE).is_err()
        );
    }
    let table = MrTable::new(1 << 17, 1);
    group.bench_function("register_and_deregister", |b| {
        b.iter_batched(
            || region(1),
            |region| {
                let keys = table.register(region).expect("there is room");
                table.deregister(keys.lkey, |_| ())
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, completion_queue, receive_queue, memory_keys);
criterion_main!(benches);
