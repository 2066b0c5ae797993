//! A message that found no receive until its sender gave up. A NAK says so to the sender; this says it to the end that should have
//! posted.

use anyverbs_causes::Cause;

use crate::env::Env;
use crate::reason::{Reason, Told, pair};
use crate::recv_queue::RecvQueue;
use crate::time::Time;
use crate::wire::reason::ReasonPacket;

use super::{Arrival, Qp};

impl Qp {
    /// The reason why the oldest packet fails, for which the peer had no receive.
    pub(super) fn reason_of_no_receive(&self, now: Time) -> Reason {
        let ms = self.not_ready_since().map_or(0, |since| now.since(since).as_millis());
        let ms = u32::try_from(ms).unwrap_or(u32::MAX);
        Reason::with(Cause::NoReceive, pair(ms, self.attr.rnr_retry.into()))
    }

    /// The retries of the oldest packet, for which the peer had no receive, have run out: tells the peer. `is_ours`: its NAK had the
    /// mark of a device of this make.
    #[cold]
    pub(super) fn tell_given_up<E: Env>(&self, is_ours: bool, env: &mut E) {
        // The peer's program has posted one, and its script of faults hid it.
        if self.is_put_off_by_rule() {
            return;
        }
        let Reason { cause, value, .. } = self.reason_of_no_receive(env.now());
        let packet = ReasonPacket {
            dest: self.attr.dest_qpn,
            psn: self.first_unanswered(),
            told: Told { cause, value },
        };
        env.tell_given_up(&self.attr.av, &packet, is_ours);
    }

    /// The peer has given up a message, since there was no receive for it here. The log says so, once for a queue pair.
    #[cold]
    pub fn note_given_up<E: Env>(&mut self, arrival: &Arrival, packet: &ReasonPacket, env: &mut E) {
        let ReasonPacket { psn, told, .. } = *packet;
        let is_it = self.attr.state.receives()
            && arrival.is_from(&self.attr.av)
            && psn == self.expected()
            && told.cause == Cause::NoReceive;
        let since = self.no_receive_since().filter(|_| is_it && self.has_sent_nak());
        let Some(since) = since else { return };
        self.trouble().has_peer_given_up = true;
        if self.lost().iter().any(|lost| lost.cause == told.cause) {
            return;
        }
        // All of its own queue are used up. Of an SRQ others may have had them.
        let before = match self.rq.as_ref().map(RecvQueue::taken) {
            None => String::new(),
            Some(0) => "; none was posted before".to_owned(),
            Some(1) => "; one was posted before".to_owned(),
            Some(n) => format!("; {n} were posted before"),
        };
        // As the sender says it.
        let time = match env.now().since(since).as_millis() {
            0 => "within a millisecond".to_owned(),
            ms => format!("for {ms} ms"),
        };
        let said = format!(
            "a message of {} was given up: no receive was posted {time}, and rnr_retry is {} there{before}",
            self.peer(self.sq.done),
            told.value & 0xffff_ffff
        );
        env.log(format_args!(
            "queue pair {:#08x}: {said}; see `anyverbs explain {}`",
            self.qpn.get(),
            told.cause
        ));
        self.note_difference((told.cause, 0), said);
    }
}
