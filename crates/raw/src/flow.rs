//! Flow rules (`ibv_create_flow(3)`).

use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::error::{CreateError, DestroyError};
use anyverbs_objects::holders::{Held, Holder};
use anyverbs_proto::raw::flow::{FlowAttr, FlowRule};

use super::counters::{CountersCell, FlowCounters};
use super::flow_action::{EspCell, FlowActionEsp};
use super::qp::{RawCell, RawQp};
use super::switch::Destination;
use super::switch::Switch;

/// A rule that is at work (`ibv_create_flow`). It ends when it is dropped.
#[derive(Debug)]
pub struct Flow {
    switch: &'static Switch,
    /// None once it is destroyed.
    state: Mutex<rank::Flow, Option<Rule>>,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct Rule {
    id: u64,
    qp: Held<RawCell>,
    counters: Option<Held<CountersCell>>,
    esp: Option<Held<EspCell>>,
}

impl RawQp {
    /// Has frames that match a rule delivered here, or dropped (`ibv_create_flow`). They are counted in `counters`, as
    /// they come, and `esp` encrypts or decrypts them. A rule for sent frames holds for all sending queue pairs, and
    /// this one only names the device.
    ///
    /// # Errors
    /// [`CreateError::Flow`] for a rule that is none, or not for this action; [`CreateError::NotPermitted`],
    /// [`CreateError::Exhausted`].
    pub fn create_flow(
        &self,
        attr: FlowAttr,
        counters: Option<&FlowCounters>,
        esp: Option<&FlowActionEsp>,
    ) -> Result<Flow, CreateError> {
        let switch = self.0.switch();
        switch.core().may_make(self.0.device())?;
        let rule = FlowRule::new(attr)?;
        let foreign = || CreateError::Foreign("counters");
        if counters.is_some_and(|c| !std::ptr::eq(c.0.core, switch.core())) {
            return Err(foreign());
        }
        let foreign_action = || CreateError::Foreign("flow action");
        if esp.is_some_and(|esp| !std::ptr::eq(esp.0.core, switch.core())) {
            return Err(foreign_action());
        }
        if let Some(esp) = esp {
            esp.0.check(&rule)?;
        }
        let qp = Held::new(&self.0, Holder::Flow).ok_or(CreateError::Foreign("queue pair"))?;
        let held =
            counters.map(|c| Held::new(&c.0, Holder::Flow).ok_or_else(foreign)).transpose()?;
        let held_esp = esp
            .map(|esp| Held::new(&esp.0, Holder::Flow).ok_or_else(foreign_action))
            .transpose()?;
        let dest = Destination {
            qp: Arc::clone(&self.0),
            counters: counters.map(|c| Arc::clone(&c.0)),
            esp: esp.map(|esp| Arc::clone(&esp.0)),
        };
        let id = switch.insert(rule, dest)?;
        Ok(Flow { switch, state: Mutex::new(Some(Rule { id, qp, counters: held, esp: held_esp })) })
    }
}

impl Flow {
    fn remove(&self) -> Option<Rule> {
        let rule = self.state.lock().take()?;
        // Whoever was delivering by it is done when this returns.
        drop(self.switch.remove(rule.id));
        Some(rule)
    }

    /// Ends the rule (`ibv_destroy_flow`): no more frames follow it.
    ///
    /// # Errors
    /// [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.switch.core().is_current() {
            return Ok(());
        }
        self.remove().map(drop).ok_or(DestroyError::Gone)
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if self.switch.core().is_current() {
            drop(self.remove());
        } else {
            // The locks are the parent's, and so is the rule.
            std::mem::forget(self.state.get_mut().take());
        }
    }
}
