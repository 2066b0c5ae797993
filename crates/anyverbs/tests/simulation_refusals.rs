//! Mistakes with simulated hosts: objects that are refused.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use anyverbs::error::{CqError, CreateError, PostError};
use anyverbs::prelude::*;
use anyverbs::simulation::{Cq, Host, Link, Pd, Qp, SetLinkError, Simulation, Slice};
use anyverbs::{QpCap, WaitError};

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
