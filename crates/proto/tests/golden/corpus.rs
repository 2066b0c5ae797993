//! The corpus of the fuzz target `packet`: made from the captures, and replayed.

#[expect(unreachable_pub, reason = "the target's file is part of another crate")]
#[path = "../../../../fuzz/src/packet.rs"]
mod target;

use std::collections::BTreeMap;
use std::fs;

use anyverbs_proto::types::{Psn, QKey, Qpn};
use anyverbs_proto::wire::aeth::{Aeth, NakCode, Syndrome};
use anyverbs_proto::wire::atomic::{AtomicAckEth, AtomicEth};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::feth::Feth;
use anyverbs_proto::wire::opcode::Opcode;
use anyverbs_proto::wire::packet::{Headers, Packet};
use anyverbs_proto::wire::reth::Reth;
use anyverbs_proto::wire::xrceth::XrcEth;

use crate::{all, without_icrc};

/// Payloads are cut to this, so that the corpus stays small.
const PAYLOAD: usize = 16;

/// A packet with its checksum, and a name that describes it.
fn seed(packet: Packet<'_>) -> (String, Vec<u8>) {
    let bth = packet.headers.bth;
    let name = format!("{}-pad{}", bth.opcode, bth.pad).to_lowercase().replace(' ', "_");
    let mut bytes = vec![0; packet.len()];
    packet.emit(&mut bytes);
    bytes.extend(target::v4().compute(0, &bytes).to_le_bytes());
    (name, bytes)
}

/// A packet of an opcode that no capture has.
fn made_up(opcode: Opcode) -> (String, Vec<u8>) {
    let headers = Headers {
        xrceth: Some(XrcEth { srqn: 3 }),
        deth: Some(Deth { qkey: QKey(0x1111_1111), src_qpn: Qpn::new(0x0a_0002) }),
        reth: Some(Reth { va: 0x7f00_0000_1000, rkey: 0x1234, len: 16 }),
        atomic: Some(AtomicEth { va: 0x7f00_0000_1000, rkey: 0x1234, swap_add: 1, compare: 2 }),
        aeth: Some(Aeth { syndrome: Syndrome::Nak(NakCode::RemoteAccess), msn: 7 }),
        atomic_ack: Some(AtomicAckEth { original: 9 }),
        feth: Some(Feth::default()),
        imm: Some(0x0102_0304),
        ieth: Some(0x1234),
        ..Headers::new(Bth::new(opcode, Qpn::new(0x0a_0001), Psn::new(17)))
    };
    let payload = [0x5a; PAYLOAD];
    let len = [PAYLOAD, 8, 0].into_iter().find(|len| opcode.admits_payload(*len)).unwrap();
    seed(Packet::new(headers, &payload[..len]))
}

fn seeds() -> BTreeMap<String, Vec<u8>> {
    let mut seeds: BTreeMap<_, _> = (0..=255).filter_map(Opcode::parse).map(made_up).collect();
    let mut captured = BTreeMap::new();
    for (_, packet) in all() {
        let packet = Packet::parse(without_icrc(&packet)).unwrap();
        let len = packet.payload.len();
        // Keeps the pad as it was.
        let cut = if len > PAYLOAD { PAYLOAD - (PAYLOAD - len % 4) % 4 } else { len };
        let (name, bytes) = seed(Packet::new(packet.headers, &packet.payload[..cut]));
        captured.entry(name).or_insert(bytes);
    }
    seeds.extend(captured);
    seeds
}

#[test]
fn seeds_are_those_of_the_captures() {
    for (name, bytes) in seeds() {
        let path = anyverbs_testing::corpus::named("packet").join(&name);
        if std::env::var_os("ANYVERBS_WRITE_SEEDS").is_some() {
            fs::write(&path, &bytes).unwrap();
        }
        let on_disk = fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(on_disk, bytes, "{name}");
    }
}

#[test]
fn corpus_breaks_nothing() {
    anyverbs_testing::corpus::replay("packet", target::run);
}
