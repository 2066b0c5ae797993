//! A server and its client on a network that loses packets, in virtual time.
//!
//! ```sh
//! simulated_rpc SEED LOSS    # two simulated hosts; LOSS is a probability
//! simulated_rpc device       # `serve` and `call`, the same two programs, on the device of this process
//! simulated_rpc system       # and on a device of the system's libibverbs, such as hardware
//! ```

use std::error::Error;
use std::pin::pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::task::{self, Poll, Waker};
use std::time::Duration;

use anyverbs::prelude::*;
use anyverbs::simulation::{Link, Simulation};
use anyverbs::system::{self, Device};

const CALLS: u32 = 100;
const SIZE: usize = 2000;
const SOON: Duration = Duration::from_secs(60);

/// One end of a connection.
struct End<V: Verbs> {
    device: V,
    qp: V::Qp,
    cq: V::Cq,
    request: V::Slice,
    reply: V::Slice,
    endpoint: Endpoint,
}

impl<V: Verbs> End<V> {
    fn new(device: V) -> Result<Rc<Self>, Box<dyn Error>> {
        let (pd, cq) = (device.alloc_pd()?, device.create_default_cq(8)?);
        let qp = device.create_default_qp(&pd, &cq, QpType::Rc)?;
        let memory = device.alloc(&pd, 2 * SIZE, Access::LOCAL_WRITE)?;
        let (request, reply) = (memory.slice(..SIZE), memory.slice(SIZE..));
        let endpoint = device.endpoint(&qp)?;
        Ok(Rc::new(Self { device, qp, cq, request, reply, endpoint }))
    }
}

/// The answer to a request: each byte is one more.
fn answer(request: &[u8]) -> Vec<u8> {
    request.iter().map(|byte| byte.wrapping_add(1)).collect()
}

async fn serve<V: Verbs>(end: Rc<End<V>>, client: Endpoint) -> Result<(), Box<dyn Error>> {
    end.qp.recv(0, &end.request)?;
    end.device.connect(&end.qp, &end.endpoint, &client)?;
    let mut answered = 0;
    while answered < CALLS {
        let wc = end.device.completion(&end.cq, SOON).await?;
        if wc.opcode == WcOpcode::Recv {
            // The client has the last reply, or it would not have called again.
            end.reply.write(&answer(&end.request.to_vec()));
            end.qp.recv(0, &end.request)?;
            end.qp.send(0, &end.reply)?;
        } else {
            answered += 1;
        }
    }
    Ok(())
}

async fn call<V: Verbs>(end: Rc<End<V>>, server: Endpoint) -> Result<(), Box<dyn Error>> {
    end.device.connect(&end.qp, &end.endpoint, &server)?;
    let mut longest = Duration::ZERO;
    for call in 0..CALLS {
        let began = end.device.now();
        end.request.write(&[call as u8; SIZE]);
        end.qp.recv(0, &end.reply)?;
        end.qp.send(0, &end.request)?;
        // The send, and the reply.
        for _ in 0..2 {
            end.device.completion(&end.cq, SOON).await?;
        }
        if end.reply.to_vec() != answer(&end.request.to_vec()) {
            return Err(format!("call {call}: the answer is wrong").into());
        }
        longest = longest.max(end.device.now() - began);
    }
    println!("{CALLS} calls, the longest took {longest:?}");
    Ok(())
}

fn simulated(seed: u64, loss: f64) -> Result<(), Box<dyn Error>> {
    let mut simulation = Simulation::new(seed);
    simulation.set_link(Link { loss, ..Link::default() })?;
    let (server, client) = (End::new(simulation.host())?, End::new(simulation.host())?);
    // Both ends stay until both programs are done: the last ACK may be lost.
    simulation.spawn(serve(Rc::clone(&server), client.endpoint));
    simulation.spawn(call(Rc::clone(&client), server.endpoint));
    simulation.run()?;
    let (sent, lost) = simulation.packets();
    println!("{lost} of {sent} packets were lost");
    Ok(())
}

fn on_devices(server: impl Verbs, client: impl Verbs) -> Result<(), Box<dyn Error>> {
    let (server, client) = (End::new(server)?, End::new(client)?);
    let serving = serve(Rc::clone(&server), client.endpoint);
    let calling = call(Rc::clone(&client), server.endpoint);
    // A runtime for two programs.
    let (mut serving, mut calling) = (pin!(serving), pin!(calling));
    let (mut served, mut called) = (false, false);
    let mut task = task::Context::from_waker(Waker::noop());
    while !(served && called) {
        if !served && let Poll::Ready(result) = serving.as_mut().poll(&mut task) {
            (served, _) = (true, result?);
        }
        if !called && let Poll::Ready(result) = calling.as_mut().poll(&mut task) {
            (called, _) = (true, result?);
        }
    }
    Ok(())
}

fn on_a_device(is_own: bool) -> Result<(), Box<dyn Error>> {
    if is_own {
        let open = || Context::open(&anyverbs::devices()?[0].name);
        return on_devices(open()?, open()?);
    }
    let names = system::devices()?;
    let device = Device::open(names.first().ok_or("the system has no RDMA device")?)?;
    on_devices(device.clone(), device)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let seed = words.first().and_then(|seed| seed.parse().ok());
    let numbers = seed.zip(words.get(1).and_then(|loss| loss.parse().ok()));
    let done = match (words.len(), numbers) {
        (1, _) if words[0] == "device" => on_a_device(true),
        (1, _) if words[0] == "system" => on_a_device(false),
        (2, Some((seed, loss))) => simulated(seed, loss),
        _ => {
            eprintln!(
                "usage: simulated_rpc SEED LOSS | simulated_rpc device | simulated_rpc system"
            );
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("simulated_rpc: {error}");
    ExitCode::FAILURE
}
