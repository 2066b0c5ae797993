use super::*;
use crate::memory::tests::Bytes;
use crate::mr::{Keys, Region};

const PD: u32 = 7;
const QPN: u32 = 3;

/// Memory of 16 KiB, and a table of keys for it.
struct World {
    memory: Bytes,
    mrs: MrTable,
}

impl World {
    fn new() -> Self {
        Self { memory: Bytes::counted(16 << 10), mrs: MrTable::new(16, 1) }
    }

    /// Memory from `addr` on, which the program names from 0x100000 on.
    fn region(&self, access: Access, addr: u64, len: u64) -> Keys {
        let region = Region { pd: PD, access, iova: 0x10_0000, len, addr };
        self.mrs.register(region).unwrap()
    }

    /// Bytes of the memory as it was in the beginning.
    fn original(addr: usize, len: usize) -> Vec<u8> {
        Bytes::counted(16 << 10).at(addr, len)
    }

    /// The bytes of a payload, copied in each of the ways; `None` if a key or the memory does not allow it.
    fn read(&self, payload: &Payload<'_>) -> Option<Vec<u8>> {
        let mut bytes = vec![0xee; payload.len()];
        let to_bytes = payload.copy_to(&self.mrs, &self.memory, &mut bytes);
        let (mut region, mut target) = (LastLocal::default(), LastRemote::default());
        let kept = (&mut region, &mut target);
        let to_addr = payload.copy_to_addr(&self.mrs, kept, &self.memory, 12 << 10);
        assert_eq!(to_bytes, to_addr, "{payload:?}");
        to_bytes.ok()?;
        assert_eq!(self.memory.at(12 << 10, bytes.len()), bytes, "{payload:?}");
        let behind = (12 << 10) + bytes.len();
        assert_eq!(self.memory.at(behind, 8), Self::original(behind, 8), "no more than that");
        self.memory.write(12 << 10, &Self::original(12 << 10, bytes.len())).unwrap();
        Some(bytes)
    }

    fn place(&self, payload: &Payload<'_>) -> Option<u64> {
        let (mut region, mut target) = (LastLocal::default(), LastRemote::default());
        payload.place(&self.mrs, (&mut region, &mut target))
    }
}

fn sge(keys: Keys, at: u64, len: u32) -> Sge {
    Sge { addr: 0x10_0000 + at, len, lkey: keys.lkey }
}

#[test]
fn pieces_cut_the_list() {
    let sge = |addr, len| Sge { addr, len, lkey: 1 };
    let list = [sge(0, 10), sge(100, 0), sge(200, 5), sge(300, 100)];
    let cut = |skip, len| pieces(&list, skip, len).map(|s| (s.addr, s.len)).collect::<Vec<_>>();
    assert_eq!(cut(0, 10), [(0, 10)]);
    assert_eq!(cut(9, 3), [(9, 1), (200, 2)]);
    assert_eq!(cut(10, 6), [(200, 5), (300, 1)]);
    assert_eq!(cut(15, 100), [(300, 100)]);
    assert_eq!(cut(0, 0), []);
}

#[test]
fn bytes_of_the_machine_are_copied() {
    let w = World::new();
    let bytes = [1, 2, 3, 4, 5];
    let payload = Payload::bytes(&bytes);
    assert_eq!(w.read(&payload).unwrap(), bytes);
    assert_eq!(w.read(&payload.part(1, 3)).unwrap(), [2, 3, 4]);
    assert_eq!(w.read(&payload.skip(4)).unwrap(), [5]);
    assert_eq!(w.place(&payload), None);
    assert!(Payload::EMPTY.is_empty() && !payload.is_empty());
}

#[test]
fn one_element_is_copied_from_its_place() {
    let w = World::new();
    let keys = w.region(Access::empty(), 100, 3000);
    let list = [sge(keys, 10, 2000)];
    for (skip, len) in [(0, 2000), (5, 1000), (1999, 1), (0, 0)] {
        let payload = Payload::gather(&list, skip, len, PD);
        let at = 110 + skip as usize;
        assert_eq!(w.read(&payload).unwrap(), World::original(at, len), "{skip} {len}");
        assert_eq!(w.place(&payload), (len > 0).then_some(at as u64), "{skip} {len}");
    }
    let part = Payload::gather(&list, 5, 1000, PD).part(7, 20);
    assert_eq!(w.read(&part).unwrap(), World::original(122, 20));
    for wrong in [
        Payload::gather(&list, 0, 2000, PD + 1),
        Payload::gather(&[sge(keys, 1001, 2000)], 0, 2000, PD),
        Payload::gather(&[Sge { lkey: keys.rkey, ..list[0] }], 0, 2000, PD),
    ] {
        assert_eq!((w.read(&wrong), w.place(&wrong)), (None, None));
    }
}

#[test]
fn several_elements_are_copied_one_after_the_other() {
    let w = World::new();
    let (one, two) = (w.region(Access::empty(), 100, 300), w.region(Access::empty(), 900, 2000));
    let list = [sge(one, 0, 300), sge(two, 50, 0), sge(two, 20, 700)];
    let whole = [World::original(100, 300), World::original(920, 700)].concat();
    for (skip, len) in [(0usize, 1000), (0, 300), (0, 301), (299, 2), (300, 700), (999, 1)] {
        let payload = Payload::gather(&list, skip as u64, len, PD);
        assert_eq!(w.read(&payload).unwrap(), whole[skip..skip + len], "{skip} {len}");
        assert_eq!(w.place(&payload), None, "it lies in two places");
    }
    let wrong = [list[0], Sge { lkey: one.rkey, ..list[2] }];
    assert_eq!(w.read(&Payload::gather(&wrong, 0, 1000, PD)), None);
    assert_eq!(w.read(&Payload::gather(&wrong, 0, 300, PD)).unwrap(), whole[..300]);
}

#[test]
fn elements_without_memory_are_zeros() {
    let w = World::new();
    let null = Region { pd: PD, access: Access::NULL, iova: 0, len: u64::MAX, addr: 0 };
    let null = Sge { addr: 0, len: 2500, lkey: w.mrs.register(null).unwrap().lkey };
    for len in [1, 1023, 1024, 1025, 2500] {
        let payload = Payload::gather(std::slice::from_ref(&null), 0, len, PD);
        assert_eq!(w.read(&payload).unwrap(), vec![0; len]);
        assert_eq!(w.place(&payload), None);
    }
    let list = [sge(w.region(Access::empty(), 10, 9), 0, 9), null];
    let both = [World::original(10, 9), vec![0; 2000]].concat();
    assert_eq!(w.read(&Payload::gather(&list, 0, 2009, PD)).unwrap(), both);
}

#[test]
fn memory_that_a_peer_reads_is_copied_under_its_key() {
    let w = World::new();
    let keys = w.region(Access::REMOTE_READ, 100, 3000);
    let closed = w.region(Access::REMOTE_WRITE, 100, 3000);
    let at = |rkey, skip: u64, len, pd| {
        Payload::remote(rkey, 0x10_0000 + skip, len, (pd, Qpn::new(QPN)))
    };
    for (skip, len) in [(0, 3000), (2999, 1), (5, 300)] {
        let payload = at(keys.rkey, skip, len, PD);
        let from = 100 + skip as usize;
        assert_eq!(w.read(&payload).unwrap(), World::original(from, len));
        assert_eq!(w.place(&payload), Some(from as u64));
    }
    let part = at(keys.rkey, 0, 3000, PD).part(17, 30);
    assert_eq!(w.read(&part).unwrap(), World::original(117, 30));
    // A READ of no byte needs no key.
    assert_eq!(w.read(&at(0, 0, 0, PD)).unwrap(), []);
    assert_eq!(w.place(&at(keys.rkey, 0, 0, PD)), None);
    for wrong in [
        at(keys.rkey, 0, 3001, PD),
        at(keys.rkey, 0, 1, PD + 1),
        at(keys.lkey, 0, 1, PD),
        at(closed.rkey, 0, 1, PD),
    ] {
        assert_eq!((w.read(&wrong), w.place(&wrong)), (None, None), "{wrong:?}");
    }
}

#[test]
fn memory_that_is_gone_is_a_fault() {
    let w = World::new();
    let keys = w.region(Access::REMOTE_READ, 1 << 30, 3000);
    assert_eq!(w.read(&Payload::gather(&[sge(keys, 0, 9)], 0, 9, PD)), None);
    let both = [sge(keys, 0, 9), sge(keys, 9, 9)];
    assert_eq!(w.read(&Payload::gather(&both, 0, 18, PD)), None);
    assert_eq!(w.read(&Payload::remote(keys.rkey, 0x10_0000, 9, (PD, Qpn::new(QPN)))), None);
    let mut short = vec![0; 9];
    assert!(Payload::bytes(&[1; 9]).copy_to(&w.mrs, &w.memory, &mut short).is_ok());
    let kept = (&mut LastLocal::default(), &mut LastRemote::default());
    let nowhere = Payload::bytes(&[1; 9]).copy_to_addr(&w.mrs, kept, &w.memory, 1 << 30);
    assert_eq!(nowhere, Err(Fault));
}

#[test]
fn data_that_came_in_is_scattered_over_the_list() {
    let data: Vec<u8> = (0..200).map(|n| 255 - n as u8).collect();
    let shared = |w: &World| {
        w.memory.write(12 << 10, &data).unwrap();
        Data::Shared { addr: 12 << 10, len: data.len() }
    };
    for is_shared in [false, true] {
        let w = World::new();
        let keys = w.region(Access::LOCAL_WRITE, 1000, 3000);
        let src = if is_shared { shared(&w) } else { Data::Bytes(&data) };
        let list = [sge(keys, 0, 50), sge(keys, 100, 0), sge(keys, 300, 400)];
        scatter(&list, 10, src, PD, &w.mrs, &w.memory).unwrap();
        assert_eq!(w.memory.at(1010, 40), data[..40]);
        assert_eq!(w.memory.at(1300, 160), data[40..]);
        for (at, len) in [(1000, 10), (1050, 250), (1460, 2000)] {
            assert_eq!(w.memory.at(at, len), World::original(at, len), "untouched");
        }
        let read_only = w.region(Access::empty(), 1000, 3000);
        let refused = scatter(&[sge(read_only, 0, 200)], 0, src, PD, &w.mrs, &w.memory);
        assert_eq!(refused, Err(ScatterError::Key(KeyError::Access)));
        let gone = w.region(Access::LOCAL_WRITE, 1 << 30, 3000);
        let refused = scatter(&[sge(gone, 0, 200)], 0, src, PD, &w.mrs, &w.memory);
        assert_eq!(refused, Err(ScatterError::Fault));
        let null = Region {
            pd: PD,
            access: Access::NULL | Access::LOCAL_WRITE,
            iova: 0,
            len: u64::MAX,
            addr: 0,
        };
        let null = Sge { addr: 1000, len: 200, lkey: w.mrs.register(null).unwrap().lkey };
        scatter(&[null], 0, src, PD, &w.mrs, &w.memory).unwrap();
        assert_eq!(w.memory.at(1000, 10), World::original(1000, 10), "written nowhere");
    }
}

#[test]
fn a_word_is_eight_bytes() {
    let w = World::new();
    let bytes = World::original(40, 8);
    let word = u64::from_ne_bytes(bytes[..].try_into().unwrap());
    assert_eq!(Data::Bytes(&bytes).word(&w.memory), Ok(word));
    assert_eq!(Data::Shared { addr: 40, len: 8 }.word(&w.memory), Ok(word));
    for len in [0, 7, 9] {
        assert_eq!(Data::Bytes(&World::original(40, len)).word(&w.memory), Err(Fault));
        assert_eq!(Data::Shared { addr: 40, len }.word(&w.memory), Err(Fault));
    }
}
