//! Handles of a target in other processes than its own (`ibv_open_qp`). The target's process carries out their calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyverbs_net::host::WAIT;
use anyverbs_objects::errno::Errno;
use anyverbs_proto::qp::attr::QpAttr;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::xrc_message::{Message, Question};
use anyverbs_transport::qp::QpCell;

use super::SharedDomains;
use super::domain::FileId;

/// The attributes, or why there are none.
pub(super) type Reply = Result<QpAttr, Errno>;

impl SharedDomains {
    /// Asks the process of a target, and waits: its attributes.
    pub(super) fn ask(&self, slot: u8, target: Qpn, question: Question) -> Result<QpAttr, Errno> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        self.asked.lock().insert(request, (slot, None));
        let sent = self.send(slot, &Message::Ask { request, target, question });
        let mut asked = self.asked.lock();
        if sent.is_err() {
            asked.remove(&request);
            return Err(Errno(libc::EINVAL));
        }
        let deadline = Instant::now() + WAIT;
        while asked.get(&request).is_some_and(|(_, reply)| reply.is_none()) {
            if asked.wait_until(deadline) {
                asked.remove(&request);
                return Err(Errno(libc::ETIMEDOUT));
            }
        }
        match asked.remove(&request) {
            Some((_, Some(reply))) => reply,
            // Its process has ended.
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    pub(super) fn note_answer(&self, from: u8, request: u64, answer: Reply) {
        if let Some((slot, reply)) = self.asked.lock().get_mut(&request)
            && *slot == from
        {
            *reply = Some(answer);
        }
        self.asked.notify_all();
    }

    pub(super) fn forget_questions(&self, slot: u8) {
        self.asked.lock().retain(|_, (asked, _)| *asked != slot);
        self.asked.notify_all();
    }
}

impl SharedDomains {
    /// A target of another process, which now counts this one among those that have it open. `enter` gives it
    /// its handle, and `leave` takes that away again.
    pub(crate) fn open_foreign(
        &'static self,
        target: Qpn,
        domain: FileId,
        enter: impl FnOnce(&QpCell),
        leave: impl FnOnce(&QpCell),
    ) -> Result<Arc<QpCell>, Errno> {
        let _opening = self.opening.lock();
        let home = target.slot();
        // First: its process may end as soon as it has answered.
        let cell = self.transport.qps.enter_foreign(
            target,
            |qpn| QpCell::foreign(self.transport, qpn, home, domain),
            enter,
        );
        if let Err(errno) = self.ask(home, target, Question::Open { domain }) {
            leave(&cell);
            self.forget_foreign(&cell);
            return Err(errno);
        }
        Ok(cell)
    }

    /// The last handle of this process was destroyed.
    pub(super) fn close_foreign(&self, cell: &Arc<QpCell>) {
        let _opening = self.opening.lock();
        if self.transport.qps.find(cell.qpn).is_some_and(|now| now.is_open()) {
            // Another thread has opened it meanwhile.
            return;
        }
        if let Some(home) = cell.home()
            && let Err(Errno(errno)) = self.ask(home, cell.qpn, Question::Close)
        {
            tracing::debug!(target = %cell.qpn, errno, "its process does not know that it is closed here");
        }
        self.forget_foreign(cell);
    }

    pub(super) fn answer_question(
        &'static self,
        from: u8,
        request: u64,
        target: Qpn,
        question: Question,
    ) {
        let (errno, attr) = match self.reply(from, target, question) {
            Ok(attr) => (0, attr),
            Err(Errno(errno)) => (errno, QpAttr::default()),
        };
        self.tell(from, &Message::Answer { request, errno, attr });
    }

    fn reply(&'static self, from: u8, target: Qpn, question: Question) -> Result<QpAttr, Errno> {
        let cell = self
            .transport
            .qps
            .find(target)
            .filter(|cell| cell.home().is_none())
            .ok_or(Errno(libc::EINVAL))?;
        match question {
            Question::Open { domain } => {
                if cell.xrc.file != Some(domain) || !cell.open_for(from) {
                    return Err(Errno(libc::EINVAL));
                }
            }
            _ if !cell.is_open_for(from) => return Err(Errno(libc::EINVAL)),
            Question::Query => {}
            Question::Close => {
                cell.close_for(from);
                return Ok(QpAttr::default());
            }
            Question::Modify { attr, mask } => {
                cell.modify(&attr, mask).map_err(|error| Errno(error.errno()))?;
            }
        }
        let state = cell.state.lock();
        if state.is_dead() { Err(Errno(libc::EINVAL)) } else { Ok(state.machine.attr()) }
    }

    /// A process has ended.
    pub(super) fn close_for(&'static self, from: u8, target: Qpn) {
        if let Some(cell) = self.transport.qps.find(target).filter(|cell| cell.home().is_none()) {
            cell.close_for(from);
        }
    }
}
