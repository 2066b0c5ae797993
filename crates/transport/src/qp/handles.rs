//! Handles of a queue pair, in this process and others, which get its events; a target that belongs to another process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use anyverbs_objects::async_event::EventElement;
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::qp::attr::{QpCap, QpInit, QpType};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::xrc_message::FileId;

use super::qp_context::QpContext;
use super::transport::Transport;
use super::{Handle, Hold, NO_DOMAIN, QpCell, State, XrcPlace};

/// The open handles of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Handles {
    pub(super) own: Vec<Arc<Handle>>,
    /// Other processes.
    pub(super) others: Vec<u8>,
}

impl Handles {
    pub(super) fn are_none(&self) -> bool {
        self.own.is_empty() && self.others.is_empty()
    }

    fn raise(&self, qpn: Qpn, event: QpEvent) {
        for handle in self.own.iter().filter(|h| h.listens.load(Ordering::Acquire)) {
            let cookie = handle.cookie.load(Ordering::Relaxed);
            let element = EventElement::Qp { qpn, cookie };
            handle.context.events.raise(event.into(), element, Some(&handle.acks));
        }
    }
}

impl QpCell {
    /// Asynchronous events of it that were read and not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.handles.lock().own.iter().map(|handle| handle.acks.unacknowledged()).sum()
    }

    /// Raises an asynchronous event of this queue pair.
    pub(crate) fn raise(&self, event: QpEvent) {
        match self.home() {
            // Its process tells all processes that have it open, this one too.
            Some(home) => self.transport.sharing().tell_event(home, self.qpn, event),
            None => self.raise_for_all(event),
        }
    }

    /// As [`raise`](Self::raise), for a report of another process.
    pub fn raise_from(&self, event: QpEvent) {
        match self.home() {
            Some(_) => self.handles.lock().raise(self.qpn, event),
            None => self.raise_for_all(event),
        }
    }

    fn raise_for_all(&self, event: QpEvent) {
        let handles = self.handles.lock();
        handles.raise(self.qpn, event);
        for slot in &handles.others {
            self.transport.sharing().tell_event(*slot, self.qpn, event);
        }
    }

    /// The XRC domain of a target.
    pub fn xrc_domain(&self) -> Option<u64> {
        Some(self.xrc.domain.load(Ordering::Relaxed)).filter(|domain| *domain != NO_DOMAIN)
    }

    /// The target of another process.
    pub fn foreign(transport: &'static Transport, qpn: Qpn, home: u8, file: FileId) -> Self {
        let state = State {
            machine: Self::foreign_machine(qpn),
            link: QpContext::default(),
            groups: Vec::new(),
            hold: Some(Hold(None, [None, None], None, None)),
        };
        Self {
            xrc: XrcPlace { file: Some(file), home: AtomicU8::new(home), ..XrcPlace::default() },
            ..Self::bare(transport, qpn, QpType::XrcRecv, state)
        }
    }

    /// A stand-in for the machine of a target of another process that is not borrowed.
    pub fn foreign_machine(qpn: Qpn) -> anyverbs_proto::qp::Qp {
        let init = QpInit {
            qp_type: QpType::XrcRecv,
            cap: QpCap::default(),
            sq_sig_all: false,
            srq: false,
            pd: 0,
        };
        anyverbs_proto::qp::Qp::new(qpn, &init)
    }

    /// The number that its domain has in this process, if it is open here.
    pub fn set_xrc_domain(&self, number: Option<u64>) {
        self.xrc.domain.store(number.unwrap_or(NO_DOMAIN), Ordering::Relaxed);
    }

    /// The process of a target that is not this one's.
    pub fn home(&self) -> Option<u8> {
        Some(self.xrc.home.load(Ordering::Acquire)).filter(|home| *home != 0)
    }

    /// Whether this process has it open.
    pub fn is_open(&self) -> bool {
        !self.handles.lock().own.is_empty()
    }

    /// Whether this process claims a target of another one.
    pub fn is_claimed(&self) -> bool {
        self.xrc.borrowed.load(Ordering::Relaxed) != 0 || !self.handles.lock().own.is_empty()
    }

    /// The process of a target has ended: nothing comes any more.
    pub fn lose_home(&self) {
        drop(self.state.lock().hold.take());
        self.handles.lock().raise(self.qpn, QpEvent::Fatal);
    }

    /// Another process opens it. False if it was destroyed.
    pub fn open_for(&self, slot: u8) -> bool {
        let mut handles = self.handles.lock();
        if handles.are_none() {
            return false;
        }
        if !handles.others.contains(&slot) {
            handles.others.push(slot);
        }
        true
    }

    /// Whether a process has a handle.
    pub fn is_open_for(&self, slot: u8) -> bool {
        self.handles.lock().others.contains(&slot)
    }

    /// Another process has closed its last handle.
    pub fn close_for(&self, slot: u8) {
        let mut handles = self.handles.lock();
        let Some(at) = handles.others.iter().position(|s| *s == slot) else { return };
        handles.others.remove(at);
        let last = handles.are_none();
        drop(handles);
        if last {
            drop(self.end());
        }
    }
}
