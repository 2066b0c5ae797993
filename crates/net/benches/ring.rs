//! Measures the cost of a message through the ring of two processes. One thread writes, publishes, reads and releases
//! it, so no cache line travels. `shm.rs` measures the same between two processors.

#![allow(clippy::unwrap_used, reason = "a measurement that fails has failed")]

use std::hint::black_box;
use std::sync::Arc;

use anyverbs_net::shm::{Channel, Config, Endpoint, MAX_HEADER, Poller};
use anyverbs_net::{Registry, Slot};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// As of a packet: BTH and RETH.
const HEADER: [u8; 28] = [7; 28];

struct Party {
    endpoint: Endpoint,
    poller: Poller,
    _slot: Slot,
}

fn party(registry: &Registry, slot: u8) -> Party {
    let slot = Slot::claim_number(registry, slot).unwrap();
    let (endpoint, poller) = Endpoint::new(&slot, Config::default()).unwrap();
    Party { endpoint, poller, _slot: slot }
}

fn push(channel: &Arc<Channel>, payload: &[u8], count: usize) {
    let mut sender = channel.sender();
    for _ in 0..count {
        let mut reservation = sender.reserve(HEADER.len(), payload.len()).unwrap();
        reservation.write_header(&HEADER);
        reservation.write_payload(0, payload);
        reservation.commit();
    }
    sender.flush();
}

fn pull(poller: &mut Poller, into: &mut [u8]) -> usize {
    poller.poll(|_, batch| {
        for message in batch {
            let mut header = [0; MAX_HEADER];
            black_box(message.header(&mut header));
            message.read_payload(0, &mut into[..message.payload_len()]);
        }
    })
}

fn ring(c: &mut Criterion) {
    let registry = Registry::new(&format!("ring-bench-{}", std::process::id())).unwrap();
    let (mut a, mut b) = (party(&registry, 1), party(&registry, 2));
    let channel: Arc<Channel> = a.endpoint.connect(2).unwrap();
    while !channel.is_established() {
        for party in [&mut a, &mut b] {
            party.endpoint.control().unwrap();
            party.poller.poll(|_, _| {});
        }
    }
    let mut into = vec![0; 64 << 10];
    for (size, count) in [(8usize, 1usize), (8, 16), (4096, 1), (32 << 10, 1)] {
        let payload = vec![3u8; size];
        let mut group = c.benchmark_group(format!("ring/{size}"));
        group.throughput(Throughput::Bytes((size * count) as u64));
        group.bench_function(format!("batch_of_{count}"), |bench| {
            bench.iter(|| {
                push(&channel, &payload, count);
                let mut got = 0;
                while got < count {
                    got += pull(&mut b.poller, &mut into);
                }
            });
        });
        group.finish();
    }
    c.bench_function("ring/empty_poll", |bench| bench.iter(|| pull(&mut b.poller, &mut into)));
}

criterion_group!(benches, ring);
criterion_main!(benches);
