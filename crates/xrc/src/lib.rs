//! XRC domains that processes of a host share: those that were opened with the same file.
//!
//! A target belongs to the process that made it, which gets its packets. A request names an SRQ, and the number of the
//! SRQ tells its process. If that is another, the responder is lent to it between two messages, and requests are
//! forwarded ([`lending`], [`borrowing`]). Handles of a target in other processes ask its process ([`opening`]). A
//! target ends with its process.
//!
//! A thread of its own waits for messages of other processes, where a domain with a file was opened; no other process has it.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod borrowing;
mod domain;
mod lending;
mod opening;
mod waiting;

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use anyverbs_locks::{Monitor, Mutex, rank};
use anyverbs_net::{Delivery, MessageBuffer, Messages, Told};
use anyverbs_objects::errno::Errno;
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpType};
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::xrc_message::{self, Message, Question};
use anyverbs_transport::progress::worker::spawn_quiet;
use anyverbs_transport::qp::env::Call;
use anyverbs_transport::qp::transport::Transport;
use anyverbs_transport::qp::{QpCell, State};

use domain::Domains;
pub use domain::{Xrcd, XrcdInitAttr};
use opening::Reply;

/// The XRC domains of this process, and what it and others that share them have to say to each other.
#[derive(Debug)]
pub struct SharedDomains {
    transport: &'static Transport,
    domains: Domains,
    messages: OnceLock<Messages>,
    starting: Mutex<rank::XrcStarting, ()>,
    next_request: AtomicU64,
    /// Questions that wait for their answers, each with the slot that was asked.
    asked: Monitor<rank::XrcQuestions, HashMap<u64, (u8, Option<Reply>)>>,
    /// Held while a target of another process is opened or closed: its process learns of both in the order in which
    /// they happen here.
    opening: Mutex<rank::XrcOpening, ()>,
    /// Room for requests that wait for responders.
    waiting: waiting::Room,
}

impl SharedDomains {
    /// No domains.
    pub fn new(transport: &'static Transport) -> Self {
        Self {
            transport,
            domains: Domains::default(),
            messages: OnceLock::new(),
            starting: Mutex::default(),
            next_request: AtomicU64::new(0),
            asked: Monitor::default(),
            opening: Mutex::default(),
            waiting: waiting::Room::default(),
        }
    }

    fn send(&self, slot: u8, message: &Message) -> std::io::Result<()> {
        let delivery = match message {
            // Asked again, or followed by others that say more.
            Message::Lend { .. }
            | Message::Progress { .. }
            | Message::Ask { .. }
            | Message::Answer { .. } => Delivery::Refusable,
            _ => Delivery::Owed,
        };
        self.send_bytes(slot, &message.emit(), delivery)
    }

    fn send_bytes(&self, slot: u8, bytes: &[u8], delivery: Delivery) -> std::io::Result<()> {
        let messages = self.messages.get();
        messages.ok_or(std::io::ErrorKind::ConnectionRefused)?.send(slot, bytes, delivery)
    }

    /// Sends a message that needs no answer.
    fn tell(&self, slot: u8, message: &Message) {
        if let Err(error) = self.send(slot, message) {
            tracing::debug!(slot, %error, "a process that shares an XRC domain is not told");
        }
    }
}

impl SharedDomains {
    /// Begins to listen to other processes.
    fn start_sharing(&'static self) -> std::io::Result<()> {
        let _starting = self.starting.lock();
        if self.messages.get().is_some() {
            return Ok(());
        }
        let slot = self.transport.links.port.slot().ok_or(std::io::ErrorKind::Unsupported)?;
        let messages = Messages::listen(Arc::clone(slot))?;
        spawn_quiet(c"anyverbs-xrc", move || self.listen_to_sharers())?;
        // The thread waits for it.
        let _ = self.messages.set(messages);
        Ok(())
    }

    fn listen_to_sharers(&'static self) {
        let messages = self.messages.wait();
        let mut buffer = MessageBuffer::new();
        loop {
            let waited = messages.wait(&mut buffer, &mut |told| match told {
                Told::Message(from, bytes) => self.hear(from, bytes),
                Told::Ended(slot) => self.lose_sharer(slot),
            });
            if let Err(error) = waited {
                tracing::error!(%error, "other processes that share XRC domains are not heard any more");
                return;
            }
        }
    }

    fn hear(&'static self, from: u8, bytes: &[u8]) {
        if let Some((target, arrival, packet)) = xrc_message::parse_packet(bytes) {
            return self.receive_borrowed(from, target, &arrival, &packet);
        }
        let Some(message) = Message::parse(bytes) else {
            return tracing::debug!(from, "a message about an XRC domain that is none");
        };
        match message {
            Message::Lend { target, lease, domain, attr, state } => {
                self.borrow(from, target, lease, domain, &attr, &state);
            }
            Message::Recall { target, lease } => self.give_back(from, target, lease),
            Message::Revoke { target, lease } => self.forget_borrowed(from, target, lease),
            Message::Attributes { target, lease, attr } => {
                self.follow_attr(from, target, lease, &attr);
            }
            Message::Return { target, lease, state } => {
                self.take_back(from, target, lease, &state);
            }
            Message::Busy { target, lease, later } => self.let_go_on(from, target, lease, later),
            Message::Progress { target, lease, expected, msn } => {
                self.note_progress(from, target, lease, expected, msn);
            }
            Message::Event { target, event } => {
                if let Some(cell) =
                    self.transport.qps.find(target).filter(|cell| is_from(cell, from))
                {
                    self.note_failure(from, &cell, event);
                    cell.raise_from(event);
                }
            }
            Message::Ask { request, target, question } => {
                self.answer_question(from, request, target, question);
            }
            Message::Answer { request, errno, attr } => {
                let answer = if errno == 0 { Ok(attr) } else { Err(Errno(errno)) };
                self.note_answer(from, request, answer);
            }
        }
        self.transport.after_unlock();
    }

    /// The process of a target has ended, and the target with it.
    fn lose_home(&self, cell: &Arc<QpCell>) {
        self.end_borrowing(cell, &mut cell.state.lock());
        cell.lose_home();
        self.forget_foreign(cell);
    }

    /// Another process has ended: its loans come back, and its handles are closed.
    fn lose_sharer(&'static self, slot: u8) {
        self.forget_questions(slot);
        for cell in self.transport.qps.filter(|cell| cell.qp_type == QpType::XrcRecv) {
            if cell.home() == Some(slot) {
                self.lose_home(&cell);
            } else if cell.home().is_none() {
                self.take_back_from_dead(slot, &cell);
                self.close_for(slot, cell.qpn);
            }
        }
        self.transport.after_unlock();
    }
}

/// Whether a process may say something about a target: its own, or one that may have borrowed it.
fn is_from(cell: &QpCell, slot: u8) -> bool {
    cell.home().is_none_or(|home| home == slot)
}

impl anyverbs_transport::qp::sharing::Sharing for SharedDomains {
    fn tell_event(&self, slot: u8, target: Qpn, event: QpEvent) {
        self.tell(slot, &Message::Event { target, event });
    }

    fn query(&self, home: u8, target: Qpn) -> Result<QpAttr, Errno> {
        self.ask(home, target, Question::Query)
    }

    fn modify(
        &self,
        home: u8,
        target: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<QpAttr, Errno> {
        self.ask(home, target, Question::Modify { attr: *attr, mask })
    }

    fn close(&self, cell: &Arc<QpCell>) {
        self.close_foreign(cell);
    }

    fn modified(&self, cell: &QpCell, state: &mut State) {
        self.note_modified(cell, state);
    }

    fn is_elsewhere(
        &'static self,
        cell: &QpCell,
        state: &mut State,
        call: &mut Call<'_>,
        arrival: &Arrival,
        packet: &Incoming<'_>,
    ) -> bool {
        self.hand_over_elsewhere(cell, state, call, arrival, packet)
    }
}
