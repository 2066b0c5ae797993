//! Calls that fail because a script of faults asks for it. In a process without a script a call looks at one word, and the posting
//! calls, which programs make by a table, look at nothing. With a script of any kind a call looks whether there are rules about it, since
//! rules may come. Only those about which there are rules are counted.

use std::{
    collections::HashMap,
    ffi::c_int,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyverbs::{FaultyCalls, config::Config};
use anyverbs_check::stack::{self, Caller};
use anyverbs_faults::{CALLS, CallAction, Dice, Fault, Rule, Running, Site, Span};
use parking_lot::{Mutex, RwLock};

use crate::{
    abi::*,
    errno::Errno,
    verbs::{self, refuse_wr},
};

/// The script of a process that lets calls fail.
struct Plan {
    seed: u64,
    /// The rules about calls.
    rules: RwLock<Arc<[&'static CallRule]>>,
    /// For each of [`CALLS`].
    calls: [Call; CALLS.len()],
    /// The slots that the posting calls had before.
    slots: OnceLock<ibv_context_ops>,
}

/// A call, by its name.
#[derive(Default)]
struct Call {
    /// Whether there are rules about it. If not, threads share nothing that they write.
    has_rules: AtomicBool,
    /// How often it was made while there were.
    count: AtomicU64,
}

/// A rule about calls.
struct CallRule {
    /// Its number among all rules.
    number: usize,
    rule: &'static Rule,
    /// The calls of its name before it.
    before: u64,
    /// The age of the device when it came. Its times count from there.
    since: Duration,
    met: Met,
}

/// The counts of a rule.
#[derive(Default)]
struct Met {
    /// Calls that it made fail.
    happened: AtomicU64,
    /// Calls from its call site, if it has one.
    from_site: AtomicU64,
    /// The return addresses that are known, and how the log names those of the site. A look-up by name takes long.
    callers: Mutex<HashMap<usize, Option<String>>>,
}

impl Met {
    /// Whether this call comes from a site, and how the log names that.
    fn caller(&self, site: &Site) -> Option<String> {
        let addresses = stack::callers();
        let mut known = self.callers.lock();
        let mut name = |address: usize| {
            let look = || {
                let caller = Caller::at(address);
                let Caller { functions, objects, offset } = &caller;
                let here = Running { functions, objects, offset: *offset };
                site.is(&here).then(|| caller.to_string())
            };
            known.entry(address).or_insert_with(look).clone()
        };
        addresses.into_iter().find_map(&mut name)
    }
}

/// Most lines of the log about one rule.
const MOST_SAID: u64 = 10;

static PLAN: OnceLock<Plan> = OnceLock::new();

/// Reads the script. A configuration that is wrong shows when a device is opened.
pub(crate) fn init() {
    let Ok(config) = Config::load() else { return };
    // Rules about calls may come later.
    let Some(script) = config.faults else { return };
    let seed = config.fault_seed;
    if !script.is_of_device() {
        tracing::warn!(
            target: "anyverbs",
            "faults are injected: seed {seed}, rules: {}; `anyverbs faults --explain` explains them",
            script.rules.len()
        );
    }
    let calls = std::array::from_fn(|_| Call::default());
    let plan = Plan { seed, rules: RwLock::new(Arc::new([])), calls, slots: OnceLock::new() };
    let plan = PLAN.get_or_init(|| plan);
    for (number, rule) in script.rules.into_iter().enumerate().filter(|(_, r)| !r.is_of_device()) {
        plan.add(number, Box::leak(Box::new(rule)));
    }
    anyverbs::take_faulty_calls(plan);
}

impl FaultyCalls for Plan {
    fn add(&self, number: usize, rule: &'static Rule) {
        let Fault::Call { call, .. } = &rule.fault else { return };
        let Call { has_rules, count } = &self.calls[place(call)];
        let before = count.load(Ordering::Relaxed);
        let (since, met) = (anyverbs::device_age(), Met::default());
        let new: &'static CallRule =
            Box::leak(Box::new(CallRule { number, rule, before, since, met }));
        let mut rules = self.rules.write();
        *rules = rules.iter().copied().chain([new]).collect();
        has_rules.store(true, Ordering::Release);
    }

    fn clear(&self) {
        let mut rules = self.rules.write();
        self.calls.iter().for_each(|call| call.has_rules.store(false, Ordering::Release));
        *rules = Arc::new([]);
    }

    fn has_fired(&self, number: usize) -> bool {
        let rules = self.rules.read();
        let rule = rules.iter().find(|rule| rule.number == number);
        rule.is_some_and(|rule| rule.met.happened.load(Ordering::Relaxed) > 0)
    }
}

/// The place in [`CALLS`] of a name that is there.
pub(crate) const fn place(name: &str) -> usize {
    let mut at = 0;
    while !is_same(CALLS[at].as_bytes(), name.as_bytes()) {
        at += 1;
    }
    at
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// The call at this place of [`CALLS`] is made: fails if a rule says so.
#[inline]
pub(crate) fn call(at: usize) -> Result<(), Errno> {
    PLAN.get().map_or(Ok(()), |plan| plan.made(at))
}

impl Plan {
    #[inline]
    fn made(&self, at: usize) -> Result<(), Errno> {
        if self.calls[at].has_rules.load(Ordering::Acquire) { self.call(at) } else { Ok(()) }
    }

    #[cold]
    fn call(&self, at: usize) -> Result<(), Errno> {
        let name = CALLS[at];
        let n = self.calls[at].count.fetch_add(1, Ordering::Relaxed) + 1;
        // A call may wait for long below, and others change the rules meanwhile.
        let rules = Arc::clone(&self.rules.read());
        for CallRule { number, rule, before, since, met } in rules.iter() {
            let Fault::Call { call, site, which, action, span } = &rule.fault else { continue };
            if *call != name {
                continue;
            }
            let (n, from) = match site {
                None => (n.saturating_sub(*before), String::new()),
                Some(site) => {
                    let Some(caller) = met.caller(site) else { continue };
                    let n = met.from_site.fetch_add(1, Ordering::Relaxed) + 1;
                    (n, format!(" from {caller}"))
                }
            };
            let is_time = || {
                *span == Span::default() || span.has(anyverbs::device_age().saturating_sub(*since))
            };
            if !Dice::new(self.seed, *number, 0).chooses(*which, n) || !is_time() {
                continue;
            }
            let happens = match action {
                CallAction::Fails(errno) => format!(" fails with {errno}"),
                CallAction::Process(action) => format!(": {action}"),
            };
            let what = format!("call {n} of {name}{from}{happens}");
            anyverbs::note_injected(rule, &what);
            let said = met.happened.fetch_add(1, Ordering::Relaxed) + 1;
            if said <= MOST_SAID {
                let more = if said == MOST_SAID { "; further ones are counted" } else { "" };
                tracing::error!(target: "anyverbs", "injected fault ({}): {what}{more}", rule.named());
            }
            match *action {
                CallAction::Fails(errno) => return Err(Errno::said(errno.number)),
                CallAction::Process(action) => {
                    if let Err(error) = anyverbs::strike_process(action) {
                        tracing::error!(target: "anyverbs", %error, "the fault did not happen");
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns from a function of C with the error that a script asks for.
macro_rules! may_fail {
    ($name:literal, $report:path) => {
        if let Err(errno) = $crate::faults::call(const { $crate::faults::place($name) }) {
            return $report($name, Err(errno));
        }
    };
}
pub(crate) use may_fail;

/// Lets a script see what is posted by this table.
pub(crate) fn watch(ops: &mut ibv_context_ops) {
    if let Some(plan) = PLAN.get() {
        // All contexts have the same.
        plan.slots.get_or_init(|| *ops);
        ops.post_send = Some(post_send);
        ops.post_recv = Some(post_recv);
        ops.post_srq_recv = Some(post_srq_recv);
        ops.req_notify_cq = Some(req_notify_cq);
    }
}

fn slots() -> Option<&'static ibv_context_ops> {
    PLAN.get()?.slots.get()
}

/// # Safety
/// As for [`verbs::post_send`].
unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    if let Err(errno) = call(const { place("ibv_post_send") }) {
        // SAFETY: the caller's promise.
        return unsafe { refuse_wr(bad, wr, errno) };
    }
    let post = slots().and_then(|slots| slots.post_send).unwrap_or(verbs::post_send);
    // SAFETY: as above.
    unsafe { post(qp, wr, bad) }
}

/// # Safety
/// As for [`verbs::post_recv`].
unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    if let Err(errno) = call(const { place("ibv_post_recv") }) {
        // SAFETY: the caller's promise.
        return unsafe { refuse_wr(bad, wr, errno) };
    }
    let post = slots().and_then(|slots| slots.post_recv).unwrap_or(verbs::post_recv);
    // SAFETY: as above.
    unsafe { post(qp, wr, bad) }
}

/// # Safety
/// As for [`verbs::post_srq_recv`].
unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    if let Err(errno) = call(const { place("ibv_post_srq_recv") }) {
        // SAFETY: the caller's promise.
        return unsafe { refuse_wr(bad, wr, errno) };
    }
    let post = slots().and_then(|slots| slots.post_srq_recv).unwrap_or(verbs::post_srq_recv);
    // SAFETY: as above.
    unsafe { post(srq, wr, bad) }
}

/// # Safety
/// As for [`verbs::req_notify_cq`].
unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    if let Err(errno) = call(const { place("ibv_req_notify_cq") }) {
        return errno.set();
    }
    let notify = slots().and_then(|slots| slots.req_notify_cq).unwrap_or(verbs::req_notify_cq);
    // SAFETY: the caller's promise.
    unsafe { notify(cq, solicited_only) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan with rules, which stays.
    fn plan(rules: &str) -> &'static Plan {
        let calls = std::array::from_fn(|_| Call::default());
        let none = RwLock::new(Arc::new([]) as Arc<[_]>);
        let plan = Plan { seed: 1, rules: none, calls, slots: OnceLock::new() };
        add(&plan, rules);
        Box::leak(Box::new(plan))
    }

    fn add(plan: &Plan, rules: &str) {
        for rule in anyverbs_faults::Script::parse(rules).unwrap().rules {
            plan.add(0, Box::leak(Box::new(rule)));
        }
    }

    const SEND: usize = place("ibv_post_send");
    const RECV: usize = place("ibv_post_recv");

    #[test]
    fn only_a_call_with_rules_is_counted_and_takes_the_lock() {
        let plan = plan("ibv_post_recv 2 fails with ENOMEM");
        // Whoever waits for this lock waits for ever.
        let held = plan.rules.write();
        for _ in 0..3 {
            assert!(plan.made(SEND).is_ok());
        }
        assert_eq!(plan.calls[SEND].count.load(Ordering::Relaxed), 0);
        drop(held);
        assert_eq!([1, 2, 3].map(|_| plan.made(RECV).is_err()), [false, true, false]);
        assert_eq!(plan.calls[RECV].count.load(Ordering::Relaxed), 3);
        plan.clear();
        assert!(plan.made(RECV).is_ok());
        assert_eq!(plan.calls[RECV].count.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_rule_counts_from_when_it_comes() {
        let plan = plan("ibv_post_send 2 fails with EIO");
        let fails = |count| (0..count).map(|_| plan.made(SEND).is_err()).collect::<Vec<_>>();
        assert_eq!(fails(3), [false, true, false]);
        add(plan, "ibv_post_send 2 fails with EIO");
        assert_eq!(fails(3), [false, true, false]);
        plan.clear();
        assert_eq!(fails(3), [false; 3]);
        add(plan, "ibv_post_send 3 fails with EIO");
        assert_eq!(fails(3), [false, false, true]);
    }

    #[test]
    fn every_name_has_its_place() {
        assert!(CALLS.iter().enumerate().all(|(at, name)| place(name) == at));
    }
}
