//! Remote procedure calls: a client sends numbers, the server answers with their sums.
//!
//! ```sh
//! rpc serve CALLS             # answers so many calls of one client
//! rpc call HOST A,B,... ...   # calls once for each list
//! ```
//!
//! The connection manager connects the two by address, as `rdma_cm(7)` does in C.

use std::error::Error;
use std::net::{Ipv4Addr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use anyverbs::cm::*;
use anyverbs::prelude::*;

const PORT: u16 = 7481;
const MOST: usize = 30;
/// A request is its id, the count of its numbers, and these. A reply is the id of its request and the sum.
const SIZE: usize = 8 + 4 * MOST;
const SOON: Duration = Duration::from_secs(10);

type Done<T> = Result<T, Box<dyn Error>>;

/// The next event of the connection manager, which must be this one.
fn expect(channel: &EventChannel, wanted: EventKind) -> Done<Event> {
    let event = channel.get_event()?;
    if event.kind != wanted {
        return Err(format!("{}, status {}", event.kind.name(), event.status).into());
    }
    Ok(event)
}

/// The means by which an id exchanges messages. Sends and receives complete apart, so that each can be waited for.
struct Messages {
    qp: Qp,
    sends: Cq,
    receives: Cq,
    outgoing: Slice,
    incoming: Slice,
}

impl Messages {
    fn of(id: &Id) -> Done<Self> {
        let device = id.info().device.ok_or("the id has no device")?;
        let context = Context::open(&anyverbs::devices()?[device].name)?;
        let pd = context.alloc_pd()?;
        let (sends, receives) = (context.create_default_cq(4)?, context.create_default_cq(4)?);
        let (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge) = (4, 4, 1, 1);
        let cap =
            QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data: 0 };
        let qp = context.create_sized_qp(&pd, &sends, &receives, cap, QpType::Rc)?;
        id.attach_qp(&qp)?;
        let memory = pd.alloc(2 * SIZE, Access::LOCAL_WRITE)?;
        let (outgoing, incoming) = (memory.slice(..SIZE), memory.slice(SIZE..));
        // A receive is posted before the message comes.
        qp.recv(0, &incoming)?;
        Ok(Self { qp, sends, receives, outgoing, incoming })
    }

    /// Sends numbers of 32 bits. All that travels is in network byte order.
    fn send(&self, words: &[u32]) -> Done<()> {
        let message: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let place = self.outgoing.slice(..message.len());
        place.write(&message);
        self.qp.send(0, &place)?;
        Ok(self.sends.wait(SOON).map(drop)?)
    }

    /// The next message. Another receive is posted at once.
    fn receive(&self) -> Done<Vec<u32>> {
        let len = self.receives.wait(SOON)?.byte_len as usize;
        let message = self.incoming.slice(..len).to_vec();
        self.qp.recv(0, &self.incoming)?;
        let (words, []) = message.as_chunks() else { return Err("a message that is none".into()) };
        Ok(words.iter().map(|word| u32::from_be_bytes(*word)).collect())
    }
}

/// The reply to a request. A peer's message is data: look before you believe.
fn answer(request: &[u32]) -> Done<[u32; 2]> {
    match request {
        [id, count, numbers @ ..] if numbers.len() == *count as usize => {
            Ok([*id, numbers.iter().fold(0, |sum, number| sum.wrapping_add(*number))])
        }
        _ => Err("a request that is none".into()),
    }
}

fn serve(calls: u32) -> Done<()> {
    let channel = create_event_channel()?;
    let listener = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0)?;
    listener.bind_addr(&Address::Ip((Ipv4Addr::UNSPECIFIED, PORT).into()))?;
    listener.listen(0)?;
    println!("waiting for calls");
    let id = expect(&channel, EventKind::ConnectRequest)?.new_id.ok_or("a request has an id")?;
    let messages = Messages::of(&id)?;
    id.accept(None)?;
    expect(&channel, EventKind::Established)?;
    for _ in 0..calls {
        messages.send(&answer(&messages.receive()?)?)?;
    }
    Ok(id.disconnect()?)
}

/// The numbers of `A,B,...`, beside the text.
fn parse(list: &str) -> Option<(&str, Vec<u32>)> {
    let numbers: Vec<_> = list.split(',').map(|word| word.parse().ok()).collect::<Option<_>>()?;
    (numbers.len() <= MOST).then_some((list, numbers))
}

fn call(host: &str, lists: &[(&str, Vec<u32>)]) -> Done<()> {
    let server = (host, PORT).to_socket_addrs()?.next().ok_or("the host has no address")?;
    let channel = create_event_channel()?;
    let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0)?;
    id.resolve_addr(None, &Address::Ip(server))?;
    expect(&channel, EventKind::AddrResolved)?;
    id.resolve_route()?;
    expect(&channel, EventKind::RouteResolved)?;
    let messages = Messages::of(&id)?;
    id.connect(&ConnParam { retry_count: 7, rnr_retry_count: 7, ..ConnParam::default() })?;
    expect(&channel, EventKind::Established)?;
    for (number, (list, numbers)) in (0u32..).zip(lists) {
        messages.send(&[&[number, numbers.len() as u32], &numbers[..]].concat())?;
        match messages.receive()?[..] {
            [id, sum] if id == number => println!("sum({list}) = {sum}"),
            _ => return Err("not a reply to this request".into()),
        }
    }
    Ok(id.disconnect()?)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let calls = words.get(1).and_then(|word| word.parse().ok()).filter(|calls| *calls > 0);
    let lists: Option<Vec<_>> = words.iter().skip(2).map(|word| parse(word)).collect();
    let done = match (words.first().map(String::as_str), calls, lists) {
        (Some("serve"), Some(calls), _) if words.len() == 2 => serve(calls),
        (Some("call"), _, Some(lists)) if !lists.is_empty() => call(&words[1], &lists),
        _ => {
            eprintln!("usage: rpc serve CALLS | rpc call HOST A,B,...");
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("rpc: {error}");
    ExitCode::FAILURE
}
