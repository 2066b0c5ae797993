//! Programs on hosts in virtual time.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::cell::RefCell;
use std::error::Error;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyverbs::error::CreateError;
use anyverbs::prelude::*;
use anyverbs::simulation::{Host, Link, RunError, Simulation};
use anyverbs::{AllocError, CompletionError, WaitError};

type Outcome = Result<(), Box<dyn Error>>;

/// Longer than any retry.
const SOON: Duration = Duration::from_secs(60);
const SIZE: usize = 3000;
const MESSAGES: u8 = 20;

/// One end of a connection, whatever the device.
struct End<V: Verbs> {
    device: V,
    pd: V::Pd,
    cq: V::Cq,
    qp: V::Qp,
    memory: V::Slice,
    endpoint: Endpoint,
}

impl<V: Verbs> End<V> {
    fn new(device: V, qp_type: QpType) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_default_cq(256).unwrap();
        let qp = device.create_default_qp(&pd, &cq, qp_type).unwrap();
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let memory = device.alloc(&pd, SIZE * usize::from(MESSAGES), access).unwrap();
        let endpoint = device.endpoint(&qp).unwrap();
        Self { device, pd, cq, qp, memory, endpoint }
    }

    fn piece(&self, number: u8) -> V::Slice {
        let start = SIZE * usize::from(number);
        self.memory.slice(start..start + SIZE)
    }

    async fn completion(&self) -> Result<Wc, WaitError> {
        self.device.completion(&self.cq, SOON).await
    }
}

fn connected<V: Verbs>(a: V, b: V, qp_type: QpType) -> (End<V>, End<V>) {
    let (a, b) = (End::new(a, qp_type), End::new(b, qp_type));
    a.device.connect(&a.qp, &a.endpoint, &b.endpoint).unwrap();
    b.device.connect(&b.qp, &b.endpoint, &a.endpoint).unwrap();
    (a, b)
}

/// Two hosts and a network with every fault, connected.
fn pair(simulation: &mut Simulation) -> (End<Host>, End<Host>) {
    let link = Link { loss: 0.1, duplicate: 0.05, reorder: 0.05, ..Link::default() };
    simulation.set_link(link).unwrap();
    connected(simulation.host(), simulation.host(), QpType::Rc)
}

/// The test keeps the end until the peer is done as well: the last ACK may be lost.
async fn give<V: Verbs>(end: Rc<End<V>>) -> Outcome {
    for number in 0..MESSAGES {
        end.piece(number).write(&[number; SIZE]);
        end.qp.send(number.into(), &end.piece(number))?;
    }
    for number in 0..MESSAGES {
        assert_eq!(end.completion().await?.wr_id, number.into());
    }
    Ok(())
}

async fn take<V: Verbs>(end: Rc<End<V>>) -> Outcome {
    for number in 0..MESSAGES {
        end.qp.recv(number.into(), &end.piece(number))?;
    }
    for number in 0..MESSAGES {
        assert_eq!(end.completion().await?.wr_id, number.into());
        assert_eq!(end.piece(number).to_vec(), [number; SIZE]);
    }
    Ok(())
}

#[test]
fn every_message_arrives_once_and_in_order_whatever_is_lost() {
    let mut lost = 0;
    for seed in 0..100 {
        let mut simulation = Simulation::new(seed);
        let (a, b) = pair(&mut simulation);
        let (a, b) = (Rc::new(a), Rc::new(b));
        simulation.spawn(give(Rc::clone(&a)));
        simulation.spawn(take(Rc::clone(&b)));
        simulation.run().unwrap();
        lost += simulation.packets().1;
    }
    assert!(lost > 100, "{lost}");
}

#[test]
fn the_same_program_runs_on_the_device_of_the_process() {
    let open = || Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let (a, b) = connected(open(), open(), QpType::Rc);
    let (a, b) = (Rc::new(a), Rc::new(b));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let tasks = tokio::task::LocalSet::new();
    let taken = tasks.spawn_local(take(Rc::clone(&b)));
    tasks.block_on(&runtime, async {
        give(a).await.unwrap();
        taken.await.unwrap().unwrap();
    });
}

/// Sends a message to itself, with a queue of completions for each direction.
async fn greet_itself<V: Verbs>(device: V) -> Outcome {
    let pd = device.alloc_pd()?;
    let (sends, receives) = (device.create_default_cq(4)?, device.create_default_cq(4)?);
    let cap = QpCap {
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let qp = device.create_sized_qp(&pd, &sends, &receives, cap, QpType::Rc)?;
    let local = device.endpoint(&qp)?;
    device.connect(&qp, &local, &local)?;
    let memory = device.alloc(&pd, 16, Access::LOCAL_WRITE)?;
    memory.slice(..5).write(b"hello");
    qp.recv(1, &memory.slice(8..))?;
    assert!(qp.recv(1, &memory.slice(8..)).is_err(), "the queue has room for one");
    qp.send(2, &memory.slice(..5))?;
    assert_eq!(device.completion(&receives, SOON).await?.wr_id, 1);
    assert_eq!(device.completion(&sends, SOON).await?.wr_id, 2);
    assert_eq!(memory.slice(8..13).to_vec(), b"hello");
    Ok(())
}

#[test]
fn sends_and_receives_complete_where_the_queue_pair_says() {
    let mut simulation = Simulation::new(1);
    let host = simulation.host();
    simulation.spawn(greet_itself(host));
    simulation.run().unwrap();
    let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(greet_itself(context)).unwrap();
}

#[test]
fn a_seed_gives_the_same_packets_again() {
    let trace = |seed| {
        let mut simulation = Simulation::new(seed);
        let (a, b) = pair(&mut simulation);
        let (a, b) = (Rc::new(a), Rc::new(b));
        simulation.spawn(give(Rc::clone(&a)));
        simulation.spawn(take(Rc::clone(&b)));
        simulation.run().unwrap();
        (simulation.now(), simulation.packets(), simulation.trace())
    };
    assert_eq!(trace(1), trace(1));
    assert_ne!(trace(1), trace(2));
}

#[test]
fn a_seed_decides_who_goes_on_first() {
    let order = |seed| {
        let mut simulation = Simulation::new(seed);
        let order = Rc::new(RefCell::new(Vec::new()));
        for number in 0..8 {
            let (host, order) = (simulation.host(), Rc::clone(&order));
            simulation.spawn(async move {
                host.sleep(Duration::from_secs(1)).await;
                order.borrow_mut().push(number);
                Ok(())
            });
        }
        simulation.run().unwrap();
        order.take()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn one_sided_requests_and_atomics_reach_the_memory_of_the_peer() {
    let mut simulation = Simulation::new(5);
    let (a, b) = pair(&mut simulation);
    b.memory.slice(..8).write(&5u64.to_ne_bytes());
    let word = b.memory.slice(..8).remote();
    simulation.spawn(async move {
        let old = a.memory.slice(..8);
        a.qp.fetch_add(1, &old, &word, 7)?;
        a.completion().await?;
        assert_eq!(old.to_vec(), 5u64.to_ne_bytes());
        a.qp.compare_swap(2, &old, &word, 12, 1)?;
        a.completion().await?;
        assert_eq!(old.to_vec(), 12u64.to_ne_bytes());
        a.qp.read(3, &old, &word)?;
        a.completion().await?;
        assert_eq!(old.to_vec(), 1u64.to_ne_bytes());
        old.write(b"replaced");
        a.qp.write(4, &old, &word)?;
        a.completion().await?;
        Ok(())
    });
    simulation.run().unwrap();
    assert_eq!(b.memory.slice(..8).to_vec(), b"replaced");
}

#[test]
fn datagrams_are_lost_and_asked_for_again() {
    let tries: u32 = (0..20).map(tries_until_answered).sum();
    assert!(tries > 20, "each datagram and its answer came through");
}

/// How often a client asks by datagrams until it has an answer.
fn tries_until_answered(seed: u64) -> u32 {
    let mut simulation = Simulation::new(seed);
    simulation.set_link(Link { loss: 0.3, ..Link::default() }).unwrap();
    let (a, b) = (simulation.host(), simulation.host());
    let (client, server) = (End::new(a, QpType::Ud), End::new(b, QpType::Ud));
    let to_server = client.device.destination(&client.pd, &server.endpoint).unwrap();
    let to_client = server.device.destination(&server.pd, &client.endpoint).unwrap();
    simulation.spawn(async move {
        loop {
            server.qp.recv(1, &server.memory.slice(..100))?;
            while server.completion().await?.opcode != WcOpcode::Recv {}
            server.qp.send_to(2, &server.memory.slice(40..48), to_client)?;
        }
    });
    let tries = Rc::new(RefCell::new(0));
    let counted = Rc::clone(&tries);
    simulation.spawn(async move {
        client.memory.slice(..8).write(b"are you ");
        client.qp.recv(1, &client.memory.slice(100..200))?;
        loop {
            *counted.borrow_mut() += 1;
            client.qp.send_to(2, &client.memory.slice(..8), to_server)?;
            assert_eq!(client.completion().await?.opcode, WcOpcode::Send);
            let wait = client.device.completion(&client.cq, Duration::from_millis(1));
            match wait.await {
                Err(WaitError::Timeout(_)) => {}
                reply => {
                    assert_eq!(reply?.opcode, WcOpcode::Recv);
                    assert_eq!(client.memory.slice(140..148).to_vec(), b"are you ");
                    return Ok(());
                }
            }
        }
    });
    // The server never ends.
    simulation.run_for(Duration::from_secs(1)).unwrap();
    assert_eq!(simulation.now(), Duration::from_secs(1));
    assert!(matches!(simulation.run(), Err(RunError::Failed { .. })), "its wait ends after 60 s");
    tries.take()
}

#[test]
fn a_host_that_is_cut_off_fails_its_peers_requests_and_no_time_passes() {
    let began = Instant::now();
    let mut simulation = Simulation::new(1);
    let (a, b) = connected(simulation.host(), simulation.host(), QpType::Rc);
    b.device.cut_off();
    simulation.spawn(async move {
        a.qp.send(1, &a.piece(0))?;
        let failed = a.completion().await;
        let Err(WaitError::Failed(CompletionError { status, .. })) = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(status, WcStatus::RetryExcErr);
        assert_eq!(a.qp.state(), QpState::Err);
        assert!(a.device.now() > Duration::from_millis(400), "eight timeouts");
        a.device.sleep(Duration::from_secs(1_000_000)).await;
        Ok(())
    });
    simulation.run().unwrap();
    assert!(simulation.now() > Duration::from_secs(1_000_000));
    assert!(began.elapsed() < SOON);
}

#[test]
fn the_first_error_of_a_program_ends_the_run() {
    let mut simulation = Simulation::new(9);
    let host = simulation.host();
    simulation.spawn(async move {
        host.sleep(Duration::from_millis(3)).await;
        Err("no more".into())
    });
    let text = simulation.run().unwrap_err().to_string();
    assert_eq!(text, "a program failed (seed 9, at 3ms): no more");
}

#[test]
fn programs_that_wait_for_nothing_are_found() {
    let mut simulation = Simulation::new(9);
    simulation.spawn(std::future::pending());
    let text = simulation.run().unwrap_err().to_string();
    assert_eq!(text, "nothing more happens, but 1 programs wait (seed 9, at 0ns)");
}

#[test]
fn a_wait_that_is_dropped_leaves_no_alarm() {
    let mut simulation = Simulation::new(1);
    let end = End::new(simulation.host(), QpType::Rc);
    simulation.spawn(async move {
        let mut wait = std::pin::pin!(end.completion());
        let mut looked = false;
        std::future::poll_fn(|task| {
            assert!(wait.as_mut().poll(task).is_pending());
            looked = true;
            std::task::Poll::Ready(())
        })
        .await;
        assert!(looked);
        Ok(())
    });
    simulation.run().unwrap();
    simulation.spawn(std::future::pending());
    simulation.run().unwrap_err();
    assert_eq!(simulation.now(), Duration::ZERO);
}

/// The send completes within its call, and no packet follows.
#[test]
fn a_program_wakes_another_that_waits_on_its_host() {
    let mut simulation = Simulation::new(3);
    simulation.set_link(Link { loss: 1.0, ..Link::default() }).unwrap();
    let peer = End::new(simulation.host(), QpType::Ud);
    let end = Rc::new(End::new(simulation.host(), QpType::Ud));
    let to_peer = end.device.destination(&end.pd, &peer.endpoint).unwrap();
    let (waits, sends) = (Rc::clone(&end), end);
    let woken = Rc::new(RefCell::new(Duration::ZERO));
    let seen = Rc::clone(&woken);
    simulation.spawn(async move {
        assert_eq!(waits.completion().await?.wr_id, 2);
        *seen.borrow_mut() = waits.device.now();
        Ok(())
    });
    simulation.spawn(async move {
        sends.device.sleep(Duration::from_secs(1)).await;
        sends.qp.send_to(2, &sends.memory.slice(..8), to_peer)?;
        Ok(())
    });
    simulation.run().unwrap();
    assert_eq!(woken.take(), Duration::from_secs(1));
}

#[test]
fn what_the_device_refuses_a_host_refuses() {
    let mut simulation = Simulation::new(1);
    let (a, b) = (simulation.host(), simulation.host());
    let (pd, cq) = (a.alloc_pd().unwrap(), a.create_default_cq(1).unwrap());
    let foreign = CreateError::Foreign("protection domain");
    assert_eq!(b.create_default_qp(&pd, &cq, QpType::Rc).unwrap_err(), foreign);
    let empty = a.create_default_cq(0).unwrap_err();
    assert!(matches!(empty, CreateError::OutOfRange { what: "cqe", value: 0, .. }), "{empty}");
    let refused = a.alloc(&pd, 0, Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(refused, AllocError::Memory { len: 0, .. }), "{refused}");
    let refused = a.alloc(&pd, 8, Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(refused, AllocError::Register { len: 8, .. }), "{refused}");
    let (rc, uc) = (End::new(a.clone(), QpType::Rc), End::new(b.clone(), QpType::Uc));
    let refused = a.connect(&rc.qp, &rc.endpoint, &uc.endpoint).unwrap_err();
    assert!(refused.to_string().contains("qp_type of the remote endpoint"), "{refused}");
    let refused = b.connect(&rc.qp, &rc.endpoint, &rc.endpoint).unwrap_err();
    assert!(refused.to_string().contains("gid of the local endpoint"), "{refused}");
}

#[test]
fn memory_that_is_gone_is_refused_to_the_device() {
    let mut simulation = Simulation::new(1);
    let (a, b) = connected(simulation.host(), simulation.host(), QpType::Rc);
    let gone = a.device.alloc(&a.pd, 64, Access::LOCAL_WRITE).unwrap();
    simulation.spawn(async move {
        a.qp.recv(1, &gone)?;
        drop(gone);
        let failed = a.completion().await.unwrap_err();
        let WaitError::Failed(CompletionError { status, .. }) = failed else { panic!("{failed}") };
        assert_eq!(status, WcStatus::LocProtErr);
        Ok(())
    });
    simulation.spawn(async move {
        b.qp.send(1, &b.piece(0).slice(..64))?;
        b.completion().await.unwrap_err();
        Ok(())
    });
    simulation.run().unwrap();
}
