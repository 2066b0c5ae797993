//! Lanes: short SENDs of a peer on this host that come and go without a packet (`docs/design/lanes.md`).
//!
//! A lane has a sender and a reader. Packets and the SENDs of the lane have one sequence of PSNs. The reader executes what is
//! next, whichever way it came, and answers with the PSN of the last request that it has executed.

use crate::env::{Env, LinkProps, Side};
use crate::memory::Memory;
use crate::payload::Data;
use crate::types::{Psn, Qpn};
use crate::wc::Wc;
use crate::wire::bth::Bth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::Headers;
use crate::wr::{SendFlags, Sge};

use super::{Arrival, Incoming, Qp, ShortRequest, ShortSend, ShortWays};

/// Most SENDs of a lane that are executed in one go.
const BATCH: usize = 64;

/// The payload of a SEND in a lane. Its sender may be changing it.
#[derive(Clone, Copy, Debug)]
pub struct LanePayload {
    /// The place of its first byte, for raw copies alone.
    pub addr: u64,
    /// The number of bytes.
    pub len: usize,
}

impl From<LanePayload> for Data<'static> {
    fn from(LanePayload { addr, len }: LanePayload) -> Self {
        Self::Shared { addr, len }
    }
}

/// A SEND that has come by a lane.
#[derive(Clone, Copy, Debug)]
pub struct LaneSend {
    /// Its headers.
    pub send: ShortRequest,
    /// Its payload, which is good until it is taken.
    pub payload: LanePayload,
    /// It ends its cell.
    pub is_last: bool,
}

/// The data of a SEND that leaves by a lane.
#[derive(Clone, Copy, Debug)]
pub enum LaneData<'a> {
    /// Bytes that were inline.
    Inline(&'a [u8]),
    /// One element.
    Element(&'a Sge),
}

/// The peer has written something into its lane that is no SEND.
#[derive(Clone, Copy, Debug)]
pub struct NotASend;

/// A queue pair's ends of its two lanes: it reads one, and has answers to the other.
pub trait LaneEnds {
    /// Most SENDs that a lane holds.
    const MOST: usize;

    /// The next SEND from the peer, if one has come.
    fn peek(&mut self) -> Result<Option<LaneSend>, NotASend>;

    /// The SEND that was looked at is done.
    fn take(&mut self, sent: &LaneSend);

    /// Tells the peer that so many SENDs of so many bytes were taken, and that everything up to a PSN is executed.
    fn answer(&mut self, taken: (usize, u64), executed: Option<Psn>);

    /// Takes the peer's answer, if it is new: the PSN of the last request that it has executed, if it has any.
    fn take_answer(&mut self) -> Option<Option<Psn>>;
}

/// The surroundings of the short ways of a lane.
pub trait ShortLanes {
    /// The ends of the lanes.
    type Ends: LaneEnds;

    /// The ends of the lanes.
    fn ends(&mut self) -> &mut Self::Ends;

    /// A SEND was executed.
    fn received(&mut self, psn: Psn, len: usize);

    /// Copies a payload to an element of a protection domain. False where the key or the memory does not allow it.
    fn write(&mut self, pd: u32, to: &Sge, payload: LanePayload) -> bool;

    /// Takes a completion, and gives it to its queue or to a thread that polls that.
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool);
}

/// The surroundings of the general way of a lane.
pub trait LaneEnv: Env {
    /// The ends of the lanes.
    type Ends: LaneEnds;

    /// The ends of the lanes.
    fn ends(&mut self) -> &mut Self::Ends;

    /// As [`LaneEnds::answer`]. Before it the completions that were handed over come to their queues: a peer that has the answer
    /// may write to memory without a message, and the program may poll because of that.
    fn answer(&mut self, taken: (usize, u64), executed: Option<Psn>);

    /// A SEND was executed, or handed over as a packet.
    fn received(&mut self, psn: Psn, len: usize);

    /// Tells whether there is a lane from the peer.
    fn is_read(&self) -> bool;

    /// Tells whether the peer has answered since.
    fn has_answer(&self) -> bool;

    /// Gives both lanes up: the peer has written nonsense.
    fn leave(&mut self);

    /// The arrival of a packet from the peer, if the queue pair still has one.
    fn peer_arrival(&self) -> Option<Arrival>;

    /// Notes that the next SEND is there before its turn.
    fn note_out_of_turn(&mut self, psn: Psn);

    /// Tells whether that was noted of the SEND with this PSN.
    fn was_out_of_turn(&self, psn: Psn) -> bool;
}

/// The finds of a look into a lane that had SENDs or an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Found {
    /// SENDs that were taken.
    pub taken: usize,
    /// The next SEND is behind packets that come by the ring.
    pub is_out_of_turn: bool,
    /// The peer has written nonsense, and the lanes were left.
    pub is_broken: bool,
}

/// Whether packets of the ring may still be in front of a SEND.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ring {
    /// They may.
    Unread,
    /// All that were there before the SEND have been read.
    Read,
}

/// The state in which the short ways leave a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rest {
    /// Everything was done.
    Nothing,
    /// [`Qp::read_lane`] goes on, after [`receive_executed`](Qp::receive_executed) has taken this answer.
    Lane(Option<Psn>),
}

impl Qp {
    /// Posts a SEND of one element and gives it to `send`, which puts it into the lane with an ACK of everything up to a PSN. The
    /// [short way](Self::short_ways) of sends is open. False: nothing was posted.
    #[inline]
    pub fn send_by_lane(
        &mut self,
        (wr_id, flags, sge): (u64, SendFlags, Sge),
        props: &LinkProps,
        memory: &impl Memory,
        send: impl FnOnce(LaneData<'_>, &ShortSend, Option<Psn>) -> bool,
    ) -> bool {
        let Some(planned) = self.plan_open(flags, sge.len, props) else { return false };
        let acks = self.executed();
        let data = if flags.contains(SendFlags::INLINE) {
            let Some(bytes) = self.copy_inline(&sge, memory) else { return false };
            LaneData::Inline(bytes)
        } else {
            LaneData::Element(&sge)
        };
        let sent = send(data, &planned, acks);
        if sent {
            self.book_short_send(wr_id, flags, sge, planned, props);
            if acks.is_some() {
                self.note_told();
            }
        }
        sent
    }

    /// Executes what has come by the lane, and takes an answer, by the `open` short ways. `None`: there was nothing of either
    /// that they could take. No ACK is owed for what is executed here: the answer tells of it.
    #[inline]
    pub fn read_lane_short(
        &mut self,
        open: ShortWays,
        lanes: &mut impl ShortLanes,
    ) -> (Option<Found>, Rest) {
        let (mut found, mut rest) = (Found::default(), Rest::Nothing);
        let mut bytes = 0;
        while found.taken < BATCH {
            let sent = match lanes.ends().peek() {
                Ok(None) => break,
                Ok(Some(sent)) if open.receives => sent,
                _ => {
                    rest = Rest::Lane(None);
                    break;
                }
            };
            let LaneSend { send, payload, .. } = sent;
            if let Some(psn) = send.acks.filter(|psn| self.awaits(*psn)) {
                let complete = |wc| lanes.complete(Side::Send, wc, false);
                if !open.sends || !self.complete_short(psn, complete) {
                    rest = Rest::Lane(None);
                    break;
                }
            }
            let len = payload.len;
            let write = |pd, sge: &Sge| lanes.write(pd, sge, payload);
            let Some(wc) = self.execute_short((send.psn, 1), len as u32, write) else {
                rest = Rest::Lane(None);
                break;
            };
            lanes.received(send.psn, len);
            lanes.complete(Side::Recv, wc, send.solicited);
            lanes.ends().take(&sent);
            found.taken += 1;
            bytes += (Bth::LEN + len) as u64;
        }
        let mut any = found.taken > 0;
        if rest == Rest::Nothing
            && let Some(answer) = lanes.ends().take_answer()
        {
            any = true;
            if let Some(psn) = answer.filter(|psn| self.awaits(*psn)) {
                let complete = |wc| lanes.complete(Side::Send, wc, false);
                if !open.sends || !self.complete_short(psn, complete) {
                    rest = Rest::Lane(Some(psn));
                }
            }
        }
        if found.taken > 0 {
            lanes.ends().answer((found.taken, bytes), self.executed());
        }
        (any.then_some(found), rest)
    }

    /// Executes the SENDs of the lane that are next, and takes an answer. A SEND that is early stays until the ring is read.
    /// `None`: there is nothing.
    #[inline]
    pub fn read_lane(&mut self, ring: Ring, env: &mut impl LaneEnv) -> Option<Found> {
        let mut found = Found::default();
        let (mut any, mut bytes) = (false, 0);
        while found.taken < BATCH {
            let sent = match env.ends().peek() {
                Ok(Some(sent)) => sent,
                Ok(None) => break,
                Err(NotASend) => {
                    (found.is_broken, any) = (true, true);
                    env.leave();
                    break;
                }
            };
            let LaneSend { send, payload, .. } = sent;
            any = true;
            if !self.receive_short_send(&send, payload.into(), env) {
                // A gap is one if the ring was read after the SEND was there.
                let is_out_of_turn = send.psn.since(self.expected()) > 0;
                if is_out_of_turn && (ring == Ring::Unread || !env.was_out_of_turn(send.psn)) {
                    // Not behind the look at the ring: one queue pair may be served twice then, for its two lanes.
                    if ring == Ring::Unread {
                        env.note_out_of_turn(send.psn);
                    }
                    found.is_out_of_turn = true;
                    break;
                }
                // Whatever is unusual is a packet.
                let Some(arrival) = env.peer_arrival() else { break };
                if let Some(psn) = send.acks {
                    self.receive_executed(psn, env);
                }
                self.receive(&arrival, &packet(self.qpn(), &send, payload.into()), env);
            }
            // Once, though it may have been there in several looks.
            env.received(send.psn, payload.len);
            env.ends().take(&sent);
            found.taken += 1;
            bytes += (Bth::LEN + payload.len) as u64;
        }
        if let Some(answer) = env.ends().take_answer() {
            any = true;
            if let Some(psn) = answer {
                self.receive_executed(psn, env);
            }
        }
        if found.taken > 0 {
            let executed = self.executed();
            env.answer((found.taken, bytes), executed);
            if executed.is_some() {
                self.note_told();
            }
        }
        any.then_some(found)
    }

    /// Executes the SENDs of the lane that come before a packet of the ring. A program expects its own send to be complete
    /// when it sees the reply, so an answer is taken as well.
    #[inline]
    pub fn read_lane_before<E: LaneEnv>(&mut self, packet: Psn, env: &mut E) {
        if env.has_answer() || (env.is_read() && packet != self.expected()) {
            // A lane holds no more. A peer that goes on meanwhile waits for the next look.
            for _ in 0..=E::Ends::MOST / BATCH {
                if self.read_lane(Ring::Unread, env).unwrap_or_default().taken < BATCH {
                    break;
                }
            }
        }
    }
}

const SEND: Opcode = Opcode::new(Service::Rc, Operation::SendOnly);

/// A SEND of a lane as the packet that it stands for.
#[cold]
fn packet(dest: Qpn, send: &ShortRequest, payload: Data<'static>) -> Incoming<'static> {
    let (pad, solicited) = (Bth::pad_of(payload.len()), send.solicited);
    let bth = Bth { solicited, migreq: true, pad, ack_req: true, ..Bth::new(SEND, dest, send.psn) };
    Incoming { headers: Headers::new(bth), payload, packets: 1, acks: None }
}
