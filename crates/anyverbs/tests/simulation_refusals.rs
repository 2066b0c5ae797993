//! Mistakes with simulated hosts: sizes, links and objects that are refused, and programs that never end.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::cell::RefCell;
use std::error::Error;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use anyverbs::error::{CqError, CreateError, PostError};
use anyverbs::prelude::*;
use anyverbs::simulation::{
    Cq, Full, Host, Link, LinkError, Pd, Qp, Rate, RunError, SetLinkError, Simulation, Slice,
};
use anyverbs::{AllocError, QpCap, WaitError};

/// A host and one object of each kind.
struct Kit {
    host: Host,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    memory: Slice,
    endpoint: Endpoint,
}

impl Kit {
    fn new(simulation: &mut Simulation, qp_type: QpType) -> Self {
        let host = simulation.host();
        let (pd, cq) = (host.alloc_pd().unwrap(), host.create_default_cq(16).unwrap());
        let qp = host.create_default_qp(&pd, &cq, qp_type).unwrap();
        let memory = host.alloc(&pd, 64, Access::LOCAL_WRITE).unwrap();
        let endpoint = host.endpoint(&qp).unwrap();
        Self { host, pd, cq, qp, memory, endpoint }
    }
}

/// The refusal of a queue pair with these sizes, on any device.
fn refusal<V: Verbs>(device: &V, cap: QpCap) -> Option<CreateError> {
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_default_cq(16).unwrap());
    device.create_sized_qp(&pd, &cq, &cq, cap, QpType::Rc).err()
}

/// The refusal of a device, without what a simulated host does not have: a name of its own.
fn without_device(mut refused: CreateError) -> CreateError {
    if let CreateError::Limit { what, of, .. } = &mut refused {
        let of = of.take();
        assert!(
            of.is_some_and(|of| of.device == "anyverbs0" && of.limit.starts_with("max_")),
            "{what}"
        );
    }
    refused
}

#[test]
fn a_host_refuses_the_sizes_that_the_device_refuses() {
    let fine = QpCap {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline_data: 16,
    };
    let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let host = Simulation::new(1).host();
    let mut refused = Vec::new();
    for value in [0, 1, 33, 1025, 16_385, u32::MAX] {
        for cap in [
            QpCap { max_send_wr: value, ..fine },
            QpCap { max_recv_wr: value, ..fine },
            QpCap { max_send_sge: value, ..fine },
            QpCap { max_recv_sge: value, ..fine },
            QpCap { max_inline_data: value, ..fine },
        ] {
            let said = refusal(&host, cap);
            assert_eq!(said, refusal(&context, cap).map(without_device), "{cap:?}");
            if let Some(CreateError::Limit { what, .. }) = said {
                refused.push(what);
            }
        }
        let of_device = Verbs::create_default_cq(&context, value).err().map(without_device);
        assert_eq!(host.create_default_cq(value).err(), of_device, "{value}");
    }
    refused.sort_unstable();
    refused.dedup();
    let fields = ["max_inline_data", "max_recv_sge", "max_recv_wr", "max_send_sge", "max_send_wr"];
    assert_eq!(refused, fields);
}

#[test]
fn memory_and_keys_that_are_not_there_are_refused() {
    let host = Simulation::new(1).host();
    let pd = host.alloc_pd().unwrap();
    for len in [1 << 60, usize::MAX] {
        let refused = host.alloc(&pd, len, Access::LOCAL_WRITE).unwrap_err();
        assert!(matches!(refused, AllocError::Memory { .. }), "{refused}");
    }
    let alloc = || host.alloc(&pd, 1, Access::LOCAL_WRITE);
    let mut kept: Vec<Slice> = (0..10_000).map(|_| alloc().unwrap()).collect();
    assert!(matches!(alloc().unwrap_err(), AllocError::Register { .. }));
    kept.pop();
    alloc().unwrap();
}

#[test]
fn an_impossible_link_is_refused_and_the_one_before_stays() {
    let mut simulation = Simulation::new(1);
    let (a, b) = (Kit::new(&mut simulation, QpType::Rc), Kit::new(&mut simulation, QpType::Rc));
    let rate = Some(Rate { bytes_per_sec: 0, queue: 1, full: Full::Drop });
    for (field, link) in [
        ("loss", Link { loss: f64::NAN, ..Link::default() }),
        ("delay", Link { delay: Duration::ZERO, ..Link::default() }),
        ("rate.bytes_per_sec", Link { rate, ..Link::default() }),
    ] {
        let LinkError { field: named, .. } = simulation.set_link(link.clone()).unwrap_err();
        assert_eq!(named, field);
        let refused = a.host.set_link_to(&b.host, link).unwrap_err();
        assert!(matches!(refused, SetLinkError::Link(error) if error.field == field));
    }
    simulation.spawn(greet(a, b));
    simulation.run().unwrap();
}

/// One message from one host to the other.
async fn greet(a: Kit, b: Kit) -> Result<(), Box<dyn Error>> {
    a.host.connect(&a.qp, &a.endpoint, &b.endpoint)?;
    b.host.connect(&b.qp, &b.endpoint, &a.endpoint)?;
    b.qp.recv(1, &b.memory)?;
    a.qp.send(2, &a.memory)?;
    b.host.completion(&b.cq, Duration::MAX).await?;
    a.host.completion(&a.cq, Duration::MAX).await?;
    Ok(())
}

#[test]
fn objects_of_another_simulation_are_refused() {
    // The same seed: hosts, numbers and keys are the same.
    let (mut one, mut other) = (Simulation::new(1), Simulation::new(1));
    let (ours, theirs) = (Kit::new(&mut one, QpType::Rc), Kit::new(&mut other, QpType::Rc));
    assert_eq!(ours.memory.sge(), theirs.memory.sge());
    let host = &ours.host;
    let foreign = |what| CreateError::Foreign(what);
    let refused = |pd, send_cq, recv_cq| {
        let cap = QpCap::default();
        host.create_sized_qp(pd, send_cq, recv_cq, cap, QpType::Rc).unwrap_err()
    };
    assert_eq!(refused(&theirs.pd, &ours.cq, &ours.cq), foreign("protection domain"));
    assert_eq!(refused(&ours.pd, &theirs.cq, &ours.cq), foreign("completion queue"));
    assert_eq!(refused(&ours.pd, &ours.cq, &theirs.cq), foreign("completion queue"));
    host.alloc(&theirs.pd, 8, Access::LOCAL_WRITE).unwrap_err();
    host.destination(&theirs.pd, &ours.endpoint).unwrap_err();
    host.endpoint(&theirs.qp).unwrap_err();
    host.connect(&theirs.qp, &theirs.endpoint, &ours.endpoint).unwrap_err();
    let refused = host.set_link_to(&theirs.host, Link::default());
    assert_eq!(refused, Err(SetLinkError::Foreign));

    host.connect(&ours.qp, &ours.endpoint, &ours.endpoint).unwrap();
    assert_eq!(ours.qp.recv(1, &theirs.memory), Err(PostError::Foreign));
    assert_eq!(ours.qp.send(1, &theirs.memory), Err(PostError::Foreign));
    one.spawn(async move {
        let wait = ours.host.completion(&theirs.cq, Duration::from_secs(1)).await;
        assert_eq!(wait, Err(WaitError::Cq(CqError::Foreign)));
        Ok(())
    });
    one.run().unwrap();
}

#[test]
fn a_destination_of_another_host_is_refused() {
    let mut simulation = Simulation::new(1);
    let (a, b) = (Kit::new(&mut simulation, QpType::Ud), Kit::new(&mut simulation, QpType::Ud));
    let to_a = b.host.destination(&b.pd, &a.endpoint).unwrap();
    assert_eq!(a.qp.send_to(1, &a.memory, to_a), Err(PostError::Foreign));
}

fn spins(simulation: &mut Simulation) {
    let error = simulation.run().unwrap_err();
    let RunError::Spins { seed: 5, at } = error else { panic!("{error}") };
    assert_eq!(at, Duration::from_secs(1));
}

#[test]
fn a_program_that_only_yields_ends_the_run() {
    let mut simulation = Simulation::new(5);
    let host = simulation.host();
    simulation.spawn(async move {
        host.sleep(Duration::from_secs(1)).await;
        poll_fn(|task| {
            task.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    });
    spins(&mut simulation);
}

#[test]
fn a_program_that_polls_without_a_timeout_ends_the_run() {
    let mut simulation = Simulation::new(5);
    let kit = Kit::new(&mut simulation, QpType::Rc);
    simulation.spawn(async move {
        kit.host.sleep(Duration::from_secs(1)).await;
        while kit.host.completion(&kit.cq, Duration::ZERO).await.is_err() {}
        Ok(())
    });
    spins(&mut simulation);
}

/// The programs of others go on while one polls, and then it sees what they did.
#[test]
fn a_wait_of_no_time_lets_others_go_on() {
    let mut simulation = Simulation::new(5);
    let host = simulation.host();
    let done = Rc::new(RefCell::new(0));
    let seen = Rc::clone(&done);
    simulation.spawn(async move {
        while *seen.borrow() < 10 {
            host.sleep(Duration::ZERO).await;
        }
        assert_eq!(host.now(), Duration::ZERO);
        Ok(())
    });
    let other = simulation.host();
    simulation.spawn(async move {
        for _ in 0..10 {
            other.sleep(Duration::ZERO).await;
            *done.borrow_mut() += 1;
        }
        Ok(())
    });
    simulation.run().unwrap();
}

#[test]
fn a_program_that_looks_without_end_panics() {
    let looks: [fn(&Kit); 4] = [
        |kit| assert_eq!(kit.host.now(), Duration::ZERO),
        |kit| assert_eq!(kit.memory.slice(..1).to_vec(), [0]),
        |kit| assert_ne!(kit.qp.state(), QpState::Rts),
        // It is not connected.
        |kit| assert!(kit.qp.send(1, &kit.memory).is_err()),
    ];
    for look in looks {
        let mut simulation = Simulation::new(5);
        let kit = Kit::new(&mut simulation, QpType::Rc);
        simulation.spawn(async move {
            loop {
                look(&kit);
            }
        });
        let panic = catch_unwind(AssertUnwindSafe(|| simulation.run())).unwrap_err();
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("does not await"), "{text}");
    }
}

#[test]
fn the_longest_times_have_an_end() {
    let mut simulation = Simulation::new(1);
    let host = simulation.host();
    simulation.spawn(async move {
        host.sleep(Duration::from_secs(1)).await;
        host.sleep(Duration::MAX).await;
        Ok(())
    });
    simulation.run_for(Duration::MAX).unwrap();
    assert_eq!(simulation.now(), Duration::from_secs(1));
    assert!(matches!(simulation.run(), Err(RunError::Stuck { waiting: 1, .. })));
    simulation.run_for(Duration::from_secs(3600)).unwrap();
    assert_eq!(simulation.now(), Duration::from_secs(3601));
}

/// On such a way nothing ever arrives, and requests fail as on one that loses everything.
#[test]
fn a_link_may_take_for_ever() {
    let mut simulation = Simulation::new(1);
    simulation.set_link(Link { delay: Duration::MAX, ..Link::default() }).unwrap();
    let (a, b) = (Kit::new(&mut simulation, QpType::Rc), Kit::new(&mut simulation, QpType::Rc));
    simulation.spawn(async move {
        a.host.connect(&a.qp, &a.endpoint, &b.endpoint)?;
        a.qp.send(1, &a.memory)?;
        let failed = a.host.completion(&a.cq, Duration::MAX).await;
        assert!(
            matches!(failed, Err(WaitError::Failed(error)) if error.status == WcStatus::RetryExcErr)
        );
        Ok(())
    });
    simulation.run().unwrap();
}
