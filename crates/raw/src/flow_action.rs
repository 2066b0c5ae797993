//! Actions of flow rules on frames (`ibv_flow_action_esp(3)`).

use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::Core;
use anyverbs_objects::error::{CreateError, DestroyError, ModifyObjectError};
use anyverbs_objects::holders::{Holdable, Holders};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::raw::esp::{Esp, EspAttr, Restart};
use anyverbs_proto::raw::flow::FlowRule;
use anyverbs_proto::raw::frame::Frame;

/// Encrypts or decrypts frames by one security association (`ibv_create_flow_action_esp`), for any number of rules.
#[derive(Debug)]
pub struct FlowActionEsp(pub(super) Arc<EspCell>);

#[derive(Debug)]
pub(super) struct EspCell {
    pub(super) core: &'static Core,
    holders: Holders,
    state: Mutex<rank::FlowAction, State>,
}

#[derive(Debug)]
struct State {
    esp: Esp,
    /// For the next frame; kept, so that none is allocated for each.
    buffer: Vec<u8>,
}

impl Holdable for EspCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl EspCell {
    pub(super) fn check(&self, rule: &FlowRule) -> Result<(), CreateError> {
        Ok(rule.check_esp(self.state.lock().esp.attr())?)
    }

    /// Encrypts or decrypts a frame, and calls `with` with the result. A frame that cannot be encrypted or decrypted
    /// ends here.
    pub(super) fn apply(&self, frame: &Frame<'_>, with: impl FnOnce(&[u8])) {
        let mut state = self.state.lock();
        let mut buffer = std::mem::take(&mut state.buffer);
        let done = state.esp.transform(frame, &mut buffer);
        // Others may be at the next frame while this one is delivered.
        drop(state);
        match done {
            Ok(()) => with(&buffer),
            Err(reason) => {
                tracing::debug!(%reason, "a flow action drops a frame");
                self.core.count_for_none(Counter::DropEsp, 1);
            }
        }
        self.state.lock().buffer = buffer;
    }
}

impl FlowActionEsp {
    #[doc(hidden)]
    pub fn create(core: &'static Core, attr: EspAttr) -> Result<Self, CreateError> {
        let state = Mutex::new(State { esp: Esp::new(attr)?, buffer: Vec::new() });
        Ok(Self(Arc::new(EspCell { core, holders: Holders::default(), state })))
    }

    /// Its parameters, as last modified.
    #[must_use]
    pub fn attr(&self) -> EspAttr {
        self.0.state.lock().esp.attr().clone()
    }

    /// Gives it other parameters, for all rules that use it (`ibv_modify_flow_action_esp`). Sequence numbers, IVs and the window go
    /// on where `restart` does not say that they are given anew.
    ///
    /// # Errors
    /// [`ModifyObjectError`]; nothing has changed then.
    pub fn modify(&self, attr: EspAttr, restart: Restart) -> Result<(), ModifyObjectError> {
        self.0.holders.check(self.0.core)?;
        Ok(self.0.state.lock().esp.modify(attr, restart)?)
    }

    /// Destroys it (`ibv_destroy_flow_action`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a rule uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            anyverbs_objects::say_again!(
                error,
                self.0.holders.id(),
                "a flow action is not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })
    }
}
