//! Memory windows, invalidation, ATOMIC WRITE and FLUSH: in one process, and between two, by shared memory and by UDP
//! (`same_host::the_same_by_udp`).

use anyverbs::*;

use crate::endpoint::*;
use crate::same_host::{Peer, SIZE, turn};

const OPEN: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ);

/// A region of this endpoint's to which windows can be bound.
fn bindable(e: &Endpoint) -> Buffer {
    let all = OPEN | Access::LOCAL_WRITE | Access::MW_BIND | Access::FLUSH_GLOBAL;
    Buffer::with_access(&e.pd, 4096, all)
}

/// The second kilobyte.
fn info(buffer: &Buffer) -> BindInfo<'_> {
    BindInfo { mr: Some(&buffer.mr), addr: buffer.addr() + 1024, len: 1024, access: OPEN }
}

fn done(e: &Endpoint) -> WcStatus {
    e.poll(1)[0].status
}

/// Lets the peer use this endpoint's region beyond WRITE, READ and atomics.
fn allow_flush(e: &Endpoint) {
    let access = OPEN | Access::FLUSH_GLOBAL;
    let attr = QpAttr { access, ..QpAttr::default() };
    e.qp.modify(&attr, QpAttrMask::ACCESS_FLAGS).unwrap();
}

/// The part of the other process in [`between_two_processes`]: opens a window, and closes it.
pub(crate) fn serve(e: &Endpoint) {
    allow_flush(e);
    let buffer = bindable(e);
    let mw = e.pd.alloc_mw(WindowType::Type2).unwrap();
    let (op, rkey) = mw.bind(mw.rkey().wrapping_add(1), &info(&buffer)).unwrap();
    e.send(1, op, &[]);
    assert_eq!(done(e), WcStatus::Success);
    println!("@ {} {rkey} {} {}", buffer.addr() + 1024, buffer.addr(), buffer.mr.rkey());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    e.send(2, SendOp::LocalInv(rkey), &[]);
    assert_eq!(done(e), WcStatus::Success);
    let (op, rkey) = mw.bind(mw.rkey().wrapping_add(1), &info(&buffer)).unwrap();
    e.send(3, op, &[]);
    assert_eq!(done(e), WcStatus::Success);
    e.recv(4, &[]);
    println!("@ {rkey}");
    std::io::stdin().read_line(&mut line).unwrap();
}

#[test]
fn between_two_processes() {
    let _turn = turn();
    for direct in ["1", "0"] {
        let mut peer = Peer::spawn("rc windows", &[("ANYVERBS_DIRECT", direct)]);
        let e = Endpoint::new(QpType::Rc);
        let buffer = Buffer::new(&e.pd, SIZE);
        peer.connect(&e, &buffer);
        let line = peer.hear();
        let word = |i: usize| line.split_whitespace().nth(i).unwrap().parse::<u64>().unwrap();
        let window = RemoteAddr { va: word(1), rkey: word(2) as u32 };
        let region = RemoteAddr { va: word(3), rkey: word(4) as u32 };
        for (i, len) in [1, 64, 1000, 1024].into_iter().enumerate() {
            let data = pattern(len, i as u8);
            buffer.write(0, &data);
            e.send(1, SendOp::Write(window), &[buffer.sge(0, len)]);
            e.send(2, SendOp::Read(window), &[buffer.sge(5000, len)]);
            assert!(e.poll(2).iter().all(|wc| wc.status == WcStatus::Success), "{len} bytes");
            assert_eq!(buffer.read(5000, len), data);
        }
        // The window and the region name the same bytes.
        let data = Some(77u64.to_ne_bytes());
        e.send(3, SendOp::AtomicWrite { at: window, data }, &[]);
        let feth = Feth { placement: Placement::GLOBAL, selectivity: Selectivity::Range };
        e.send(4, SendOp::Flush { at: region, len: 4096, feth }, &[]);
        let at = RemoteAddr { va: region.va + 1024, ..region };
        e.send(5, SendOp::Read(at), &[buffer.sge(0, 8)]);
        let wcs = e.poll(3);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        assert_eq!(buffer.read(0, 8), 77u64.to_ne_bytes());
        peer.say("close, and open another");
        let other = peer.hear().split_whitespace().nth(1).unwrap().parse().unwrap();
        let other = RemoteAddr { rkey: other, ..window };
        // Together: the end of the window waits for accesses through it.
        let sges = [buffer.sge(0, 8)];
        let wr = |wr_id, op, sges| SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            sges,
            ud: None,
            xrc_srqn: 0,
        };
        let mut list: Vec<_> = (6..26).map(|i| wr(i, SendOp::Write(other), &sges[..])).collect();
        list.push(wr(30, SendOp::SendInv(other.rkey), &[]));
        e.qp.post_send(&list).unwrap();
        let wcs = e.poll(21);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        let closed = if direct == "1" { other } else { window };
        e.send(31, SendOp::Write(closed), &[buffer.sge(0, 8)]);
        assert_eq!(done(&e), WcStatus::RemAccessErr);
    }
}

#[test]
fn in_one_process_and_who_holds_whom() {
    let (a, b) = pair(QpType::Rc);
    let src = Buffer::new(&a.pd, 4096);
    let buffer = bindable(&b);
    let mw = b.pd.alloc_mw(WindowType::Type1).unwrap();
    let (op, rkey) = mw.bind(mw.rkey(), &info(&buffer)).unwrap();
    b.send(1, op, &[]);
    assert_eq!(b.poll(1)[0].opcode, WcOpcode::BindMw);
    let data = pattern(1024, 3);
    src.write(0, &data);
    let at = RemoteAddr { va: buffer.addr() + 1024, rkey };
    a.send(2, SendOp::Write(at), &[src.sge(0, 1024)]);
    assert_eq!(done(&a), WcStatus::Success);
    assert_eq!(buffer.read(1024, 1024), data);
    let busy = buffer.mr.destroy().unwrap_err();
    assert_eq!(busy, error::DestroyError::Busy("memory windows".into()));
    // SAFETY: nothing is changed.
    let refused = unsafe { buffer.mr.rereg(&Rereg { access: Some(OPEN), ..Rereg::default() }) };
    assert_eq!(refused, Err(error::RegisterError::Access));
    let access = Some(Access::LOCAL_WRITE);
    // SAFETY: as above.
    let refused = unsafe { buffer.mr.rereg(&Rereg { access, ..Rereg::default() }) };
    assert_eq!(refused, Err(error::RegisterError::Bound));
    assert!(matches!(b.pd.destroy(), Err(error::DestroyError::Busy(_))));
    mw.destroy().unwrap();
    assert_eq!(mw.destroy(), Err(error::DestroyError::Gone));
    buffer.mr.destroy().unwrap();
    a.send(3, SendOp::Write(at), &[src.sge(0, 8)]);
    assert_eq!(done(&a), WcStatus::RemAccessErr);
}

#[test]
fn a_region_that_is_dropped_takes_its_windows_along() {
    let (a, b) = pair(QpType::Rc);
    let src = Buffer::new(&a.pd, 64);
    let buffer = bindable(&b);
    let mw = b.pd.alloc_mw(WindowType::Type2).unwrap();
    let (op, rkey) = mw.bind(mw.rkey(), &info(&buffer)).unwrap();
    b.send(1, op, &[]);
    assert_eq!(done(&b), WcStatus::Success);
    let at = RemoteAddr { va: buffer.addr() + 1024, rkey };
    drop(buffer);
    a.send(2, SendOp::Write(at), &[src.sge(0, 8)]);
    assert_eq!(done(&a), WcStatus::RemAccessErr);
}

#[test]
fn invalid_binds_are_refused() {
    let (_, b) = pair(QpType::Rc);
    let buffer = bindable(&b);
    let mw = b.pd.alloc_mw(WindowType::Type2).unwrap();
    let refused = |info: BindInfo<'_>| mw.bind(0, &info).unwrap_err();
    let good = info(&buffer);
    assert_eq!(refused(BindInfo { mr: None, ..good }), error::PostError::Bind);
    assert_eq!(refused(BindInfo { access: Access::INVALIDATABLE, ..good }), error::PostError::Bind);
    assert_eq!(refused(BindInfo { access: Access::NULL, ..good }), error::PostError::Bind);
    // A right that means nothing.
    assert!(mw.bind(0, &BindInfo { access: Access::MW_BIND, ..good }).is_ok());
}

#[test]
fn a_region_that_peers_may_invalidate() {
    let (a, b) = pair(QpType::Rc);
    let src = Buffer::new(&a.pd, 64);
    let access = OPEN | Access::LOCAL_WRITE | Access::INVALIDATABLE;
    let buffer = Buffer::with_access(&b.pd, 64, access);
    b.recv(1, &[]);
    a.send(2, SendOp::Write(buffer.remote(0)), &[src.sge(0, 8)]);
    a.send(3, SendOp::SendInv(buffer.mr.rkey()), &[]);
    assert!(a.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
    let wc = b.poll(1)[0];
    assert_eq!((wc.flags, wc.imm), (WcFlags::WITH_INV, buffer.mr.rkey()));
    a.send(4, SendOp::Write(buffer.remote(0)), &[src.sge(0, 8)]);
    assert_eq!(done(&a), WcStatus::RemAccessErr);
}

#[test]
fn device_memory_has_an_end_and_holders() {
    let e = Endpoint::new(QpType::Rc);
    let max = e.context.device_attr().unwrap().max_dm_size;
    let dm = e.context.alloc_dm(4096, 3).unwrap();
    let mut back = [1; 8];
    dm.read(0, &mut back).unwrap();
    assert_eq!(back, [0; 8]);
    dm.write(4088, &[7; 8]).unwrap();
    assert_eq!(dm.write(4092, &[7; 8]), Err(error::DmError::Range));
    assert_eq!(dm.read(2, &mut back), Err(error::DmError::Range));
    assert!(matches!(e.context.alloc_dm(max, 0), Err(error::CreateError::Exhausted(_))));
    let access = Access::LOCAL_WRITE | Access::ZERO_BASED;
    let mr = e.pd.reg_dm_mr(&dm, 0, 4096, access).unwrap();
    assert_eq!(dm.destroy(), Err(error::DestroyError::Busy("1 MR".into())));
    mr.destroy().unwrap();
    dm.destroy().unwrap();
    assert_eq!(dm.destroy(), Err(error::DestroyError::Gone));
    // Freed memory is there again, and zero.
    let dm = e.context.alloc_dm(max, 0).unwrap();
    dm.read(4088, &mut back).unwrap();
    assert_eq!(back, [0; 8]);
    // Another context has its own.
    assert!(context().alloc_dm(max, 0).is_ok());
}
