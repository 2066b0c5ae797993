//! Publish and subscribe: datagrams to a multicast group reach every subscriber.
//!
//! ```sh
//! pubsub sub GROUP COUNT      # prints so many messages
//! pubsub pub GROUP TEXT ...   # sends one message for each text
//! ```
//!
//! GROUP is an address such as 239.7.4.1. Datagrams are not acknowledged: a subscriber that is slow or late misses some.

use std::error::Error;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyverbs::UdDest;
use anyverbs::cm::*;
use anyverbs::prelude::*;

const SIZE: usize = 256;
/// A datagram arrives with room for its headers before it.
const GRH: usize = 40;
const DEPTH: usize = 16;

type Done<T> = Result<T, Box<dyn Error>>;

/// The next event of the connection manager, which must be this one.
fn expect(channel: &EventChannel, wanted: EventKind) -> Done<Event> {
    let event = channel.get_event()?;
    if event.kind != wanted {
        return Err(format!("{}, status {}", event.kind.name(), event.status).into());
    }
    Ok(event)
}

/// A queue pair that is in a group until the value is dropped.
struct Member {
    qp: Qp,
    cq: Cq,
    memory: Region,
    group: Address,
    /// How the members are reached.
    members: UdDest,
    id: Id,
}

impl Member {
    fn join(group: &str) -> Done<Self> {
        let group = Address::Ip((group.parse::<IpAddr>()?, 0).into());
        let channel = create_event_channel()?;
        let id = Id::create(&channel, PortSpace::Udp, QpType::Ud, 0)?;
        // The route to the group decides the interface.
        id.resolve_addr(None, &group)?;
        expect(&channel, EventKind::AddrResolved)?;
        let device = id.info().device.ok_or("the id has no device")?;
        let context = Context::open(&anyverbs::devices()?[device].name)?;
        let (pd, cq) = (context.alloc_pd()?, context.create_default_cq(2 * DEPTH as u32)?);
        let qp = context.create_default_qp(&pd, &cq, QpType::Ud)?;
        id.attach_qp(&qp)?;
        id.join(&Join { group, send_only: false, cookie: 0 })?;
        let EventParam::Ud(joined) = expect(&channel, EventKind::MulticastJoin)?.param else {
            return Err("the event does not say how the group is reached".into());
        };
        let members = pd.create_ah(&joined.ah)?.dest(joined.qpn, joined.qkey);
        let memory = pd.alloc(DEPTH * (GRH + SIZE), Access::LOCAL_WRITE)?;
        Ok(Self { qp, cq, memory, group, members, id })
    }

    /// Each message has a place of its own.
    fn place(&self, number: usize) -> Slice {
        let begin = number % DEPTH * (GRH + SIZE);
        self.memory.slice(begin..begin + GRH + SIZE)
    }

    fn publish(&self, texts: &[&str]) -> Done<()> {
        for text in texts {
            let message = &text.as_bytes()[..text.len().min(SIZE)];
            let place = self.place(0).slice(..message.len());
            place.write(message);
            self.qp.send_to(0, &place, self.members)?;
            self.cq.wait(Duration::from_secs(10))?;
        }
        Ok(self.id.leave(&self.group)?)
    }

    fn subscribe(&self, group: &str, count: usize) -> Done<()> {
        for number in 0..DEPTH {
            self.qp.recv(number as u64, &self.place(number))?;
        }
        println!("subscribed to {group}");
        for _ in 0..count {
            let wc = self.cq.wait(Duration::MAX)?;
            let place = self.place(wc.wr_id as usize);
            let message = place.slice(GRH..wc.byte_len as usize).to_vec();
            println!("{}", String::from_utf8_lossy(&message));
            self.qp.recv(wc.wr_id, &place)?;
        }
        Ok(self.id.leave(&self.group)?)
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let count = words.get(2).and_then(|count| count.parse().ok()).filter(|count| *count > 0);
    let done = match (&words[..], count) {
        (["sub", group, _], Some(count)) => {
            Member::join(group).and_then(|member| member.subscribe(group, count))
        }
        (["pub", group, texts @ ..], _) if !texts.is_empty() => {
            Member::join(group).and_then(|member| member.publish(texts))
        }
        _ => {
            eprintln!("usage: pubsub sub GROUP COUNT | pubsub pub GROUP TEXT...");
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("pubsub: {error}");
    ExitCode::FAILURE
}
