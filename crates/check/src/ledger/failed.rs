//! Completions of work that failed, whose cause the device knows.

use std::time::Instant;

use anyverbs_causes::Cause;

use crate::catalogue::Check;
use crate::facts::{Completion, Dropped, DroppedDatagrams, Kind, LONGEST_WAIT, Region};
use crate::report;
use crate::stack::Stack;

use super::outstanding::Posted;
use super::{Ledger, here};

/// `IBV_WC_WR_FLUSH_ERR`: the work was given up, since other work had failed.
const FLUSHED: u32 = 5;

/// The access flag that memory needs which the device writes.
const LOCAL_WRITE: u32 = 1;

/// The names of access flags.
const RIGHTS: [(u32, &str); 5] = [
    (LOCAL_WRITE, "LOCAL_WRITE"),
    (2, "REMOTE_WRITE"),
    (4, "REMOTE_READ"),
    (8, "REMOTE_ATOMIC"),
    (16, "MW_BIND"),
];

/// The rights of a region in words.
fn rights(region: &Region) -> String {
    let has = |(flag, _): &&(u32, _)| region.access & flag != 0;
    let rights: Vec<_> = RIGHTS.iter().filter(has).map(|(_, name)| *name).collect();
    if rights.is_empty() { "none".into() } else { rights.join(", ") }
}

/// The queue that work was posted to, as far as its memory is concerned.
#[derive(Clone, Copy)]
struct Owner {
    /// The address of the SRQ.
    srq: Option<usize>,
    /// The address of the protection domain.
    pd: usize,
}

/// The check that a cause belongs to.
pub(super) fn check_of(cause: Cause) -> Option<Check> {
    Some(match cause {
        Cause::RkeyAsLkey | Cause::LkeyAsRkey => Check::WrongKey,
        Cause::LkeyRight | Cause::RkeyRight | Cause::WindowRight | Cause::QpRight => Check::Rights,
        Cause::LkeyOfOtherPd | Cause::RkeyOfOtherPd | Cause::AhOfOtherPd => Check::PdMismatch,
        Cause::MessageTooLong | Cause::PeerMessageTooLong => Check::ReceiveTooSmall,
        Cause::NoReceive | Cause::UcNoReceive => Check::NoReceive,
        Cause::LkeyDeregistered | Cause::RkeyDeregistered => Check::UseAfterDestroy,
        Cause::PsnDiffers
        | Cause::MtuDiffers
        | Cause::GidDiffers
        | Cause::QpnDiffers
        | Cause::TypeDiffers
        | Cause::PkeyDiffers => Check::EndsDiffer,
        _ => return None,
    })
}

/// Whether the peer has no part in a failure: the causes of `IBV_WC_LOC_PROT_ERR`.
fn is_local(cause: Cause) -> bool {
    cause.number() / 100 == 4
}

impl Ledger {
    pub(super) fn check_failure(&mut self, qp: usize, completion: &Completion, posted: &Posted) {
        let cause = u16::try_from(completion.cause).ok().and_then(Cause::from_number);
        let Some(cause) = cause.filter(|_| completion.status != FLUSHED) else { return };
        let check = check_of(cause);
        let check = check.or_else(|| self.differs_in_mtu(qp, cause).then_some(Check::EndsDiffer));
        let Some(check) = check else { return };
        if check == Check::EndsDiffer && !self.is_first_drop(qp, check) {
            return;
        }
        let Posted { work, stack, .. } = posted;
        let owner = self.owner(qp, completion.is_receive);
        let culprit = owner.and_then(|owner| self.culprit(owner, cause, posted));
        let why = match culprit {
            None => self.words_of_log(qp, cause, (work.wr_id, completion.is_receive)),
            Some(_) => None,
        };
        let mut what = format!(
            "a {} (wr_id {:#x}) of queue pair {:#08x} failed: {}",
            work.name,
            work.wr_id,
            completion.number,
            why.as_deref().unwrap_or(cause.text())
        );
        let mut stacks = vec![
            ("Its completion was polled here".into(), Stack::here()),
            ("The work was posted here".into(), *stack),
        ];
        if let Some((region, facts)) = culprit {
            what.push_str(&facts);
            stacks.extend(self.origins_of_region(region));
            if let Some(Owner { srq: Some(srq), .. }) = owner
                && cause == Cause::LkeyOfOtherPd
            {
                stacks.push(self.origin(srq, "The SRQ was made here"));
            }
        }
        if cause == Cause::AhOfOtherPd && self.objects.contains_key(&work.ah) {
            stacks.push(self.origin(work.ah, "The address handle was made here"));
            stacks.push(self.origin(qp, "The queue pair was made here"));
        }
        let dead = || posted.work.pieces.iter().find_map(|piece| self.dead_region(piece.lkey));
        if cause == Cause::LkeyDeregistered
            && let Some([made, ended]) = dead()
        {
            stacks.push(("The region was deregistered here".into(), ended));
            stacks.push(("The region was registered here".into(), made));
        }
        if let Some((peer, number)) = self.peer_in_process(qp).filter(|_| !is_local(cause)) {
            // Both ends are here, and learn it. One report names both. If the peer's came first, since the peer was reset, there are two: this one
            // alone knows where the work was posted.
            if matches!(check, Check::NoReceive | Check::Rights) {
                self.is_first_drop(peer, check);
            }
            if let Some((facts, origins)) = self.refused_region(peer, cause) {
                what.push_str(&facts);
                stacks.extend(origins);
            }
            what.push_str(&format!("; the peer is queue pair {number:#08x} of this process"));
            stacks.push(self.origin(peer, "The peer's queue pair was made here"));
            if cause == Cause::RkeyOfOtherPd {
                self.is_first_drop(peer, check);
            }
        }
        self.report(check, what, stacks);
    }

    /// The program reads a field of a failed completion that is undefined.
    pub fn reads_undefined(&mut self, completion: &Completion, field: &'static str) {
        if self.undefined.contains(&field) {
            return;
        }
        self.undefined.push(field);
        let Completion { number, wr_id, status, .. } = *completion;
        let what = format!(
            "ibv_wc_{field} is called for a completion of queue pair {number:#08x} (wr_id {wr_id:#x}) whose status is {status}: the field is undefined"
        );
        self.report(Check::FailedWcOpcode, what, vec![here(Stack::here())]);
    }

    /// The undefined fields of a failed completion were filled with nonsense.
    pub fn poisons(&mut self) {
        if !std::mem::replace(&mut self.has_told_of_poison, true) {
            report::say(&format!(
                "anyverbs check: note: work has failed, and the undefined fields of its completion hold 0x5a5a5a5a; see `anyverbs explain {}`\n",
                Check::FailedWcOpcode
            ));
        }
    }

    /// The object whose protection domain counts for the work of a queue pair. An SRQ may have another one than its queue pairs.
    fn owner(&self, qp: usize, is_receive: bool) -> Option<Owner> {
        let qp = self.queues.get(&qp)?.qp?;
        if !is_receive || qp.srq == 0 {
            return Some(Owner { srq: None, pd: qp.pd });
        }
        let srq = self.objects.get(&qp.srq)?;
        Some(Owner { srq: Some(qp.srq), pd: *srq.uses.first()? })
    }

    /// The region that a local cause is about, and its facts.
    fn culprit(&self, owner: Owner, cause: Cause, posted: &Posted) -> Option<(usize, String)> {
        let Owner { srq, pd } = owner;
        let mut regions =
            posted.work.pieces.iter().filter_map(|piece| self.regions.of_key(piece.lkey));
        match cause {
            Cause::LkeyRight => {
                let (address, region) =
                    regions.find(|(_, region)| region.access & LOCAL_WRITE == 0)?;
                let (addr, rights) = (region.addr, rights(region));
                Some((
                    address,
                    format!(
                        "; the region at {addr:#x} lacks LOCAL_WRITE, and its rights are: {rights}"
                    ),
                ))
            }
            Cause::LkeyOfOtherPd => {
                let (address, region) = regions.find(|(_, region)| region.pd != pd)?;
                let addr = region.addr;
                let [other, own] = [region.pd, pd].map(|pd| self.place(Kind::Pd, pd));
                let whose = srq.map_or("queue pair".into(), |srq| format!("SRQ at {srq:#x}"));
                Some((
                    address,
                    format!(
                        "; the region at {addr:#x} belongs to the {other}, and the {whose} to the {own}"
                    ),
                ))
            }
            _ => None,
        }
    }

    /// The region that a remote key names: its facts, and where it was registered.
    pub(super) fn region_of_rkey(
        &self,
        rkey: u32,
        check: Check,
    ) -> Option<(String, Vec<(String, Stack)>)> {
        let mut regions = self.regions.by_key.values();
        let (address, region) = regions.find(|(_, region)| region.rkey == rkey && rkey != 0)?;
        let facts = match check {
            Check::PdMismatch => format!("belongs to the {}", self.place(Kind::Pd, region.pd)),
            _ => format!("has the rights: {}", rights(region)),
        };
        let facts = format!("; the region at {:#x} ({} bytes) {facts}", region.addr, region.len);
        Some((facts, self.origins_of_region(*address)))
    }

    /// The words that the log has for this failure.
    fn words_of_log(
        &self,
        qp: usize,
        cause: Cause,
        (wr_id, is_receive): (u64, bool),
    ) -> Option<String> {
        let facts = (self.drops_of)(qp, Instant::now() + LONGEST_WAIT);
        facts.into_iter().find_map(|facts| match facts.reason {
            Dropped::Work { cause: of, wr_id: id, why } => {
                (of == cause.number() && (is_receive || id == wr_id)).then_some(why)
            }
            _ => None,
        })
    }

    /// Whether the response of a READ came in packets of another path MTU.
    fn differs_in_mtu(&self, qp: usize, cause: Cause) -> bool {
        let is_it = |drops: &DroppedDatagrams| matches!(drops.reason, Dropped::Message { cause, .. } if cause == Cause::MtuDiffers.number());
        cause == Cause::BadResponse
            && (self.drops_of)(qp, Instant::now() + LONGEST_WAIT).iter().any(is_it)
    }

    /// The region for which this queue pair has refused a request for this cause.
    fn refused_region(&self, qp: usize, cause: Cause) -> Option<(String, Vec<(String, Stack)>)> {
        if !matches!(cause, Cause::RkeyRight | Cause::RkeyOfOtherPd) {
            return None;
        }
        let check = check_of(cause)?;
        let drops = (self.drops_of)(qp, Instant::now() + LONGEST_WAIT);
        drops.iter().find_map(|drops| match drops.reason {
            Dropped::Message { cause: of, key, .. } if of == cause.number() => {
                self.region_of_rkey(key, check)
            }
            _ => None,
        })
    }

    /// The peer of a queue pair, if the two are surely connected to each other: its address and number.
    fn peer_in_process(&self, qp: usize) -> Option<(usize, u32)> {
        let own = self.queues.get(&qp)?;
        let address = *self.numbers.get(&own.peer)?;
        let is_mutual = self.queues.get(&address)?.peer == own.qp?.number;
        is_mutual.then_some((address, own.peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Elements, Piece, Pieces, QueuePair, Work};
    use crate::report::Reporter;

    /// The report of what `happens` to the queue pair at address 1, for this cause. Its region at 2 lets peers read alone.
    fn report_of(cause: Cause, happens: impl FnOnce(&mut Ledger)) -> String {
        let name = format!("anyverbs-failed-{}-{}", cause.number(), std::process::id());
        let file = std::env::temp_dir().join(name);
        let reporter = Reporter::new("", Some(file.clone()));
        let mut ledger = Ledger::new(reporter, |_, _| false, |_, _| vec![]);
        ledger.made(1, Kind::Qp, 0);
        ledger.made(2, Kind::Mr, 0);
        ledger.made(3, Kind::Ah, 0);
        let qp = QueuePair {
            number: 17,
            is_datagram: true,
            is_uc: false,
            is_reliable: false,
            signals_all: false,
            max_inline: 0,
            max_sends: 16,
            srq: 0,
            pd: 0,
            send_cq: 0,
            recv_cq: 0,
        };
        ledger.made_qp(1, qp);
        let region = Region { addr: 4096, iova: 4096, len: 64, lkey: 5, rkey: 6, pd: 0, access: 4 };
        ledger.made_region(2, region);
        happens(&mut ledger);
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        text
    }

    #[test]
    fn a_response_in_packets_of_another_size_is_a_difference_of_the_ends() {
        for (differs, expected) in [(true, 1), (false, 0)] {
            let drops: crate::facts::DropsOf = match differs {
                true => |_, _| {
                    let cause = Cause::MtuDiffers.number();
                    let reason = Dropped::Message { cause, key: 0, first: String::new() };
                    vec![DroppedDatagrams { reason, count: 1, from: String::new() }]
                },
                false => |_, _| vec![],
            };
            let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, drops);
            ledger.made_qp(
                1,
                QueuePair {
                    number: 17,
                    is_datagram: false,
                    is_uc: false,
                    is_reliable: true,
                    signals_all: false,
                    max_inline: 0,
                    max_sends: 16,
                    srq: 0,
                    pd: 0,
                    send_cq: 0,
                    recv_cq: 0,
                },
            );
            let read = Work {
                name: "READ",
                wr_id: 3,
                is_signaled: true,
                is_inline: false,
                elements: Elements::Written,
                is_fenced: false,
                ah: 0,
                pieces: Pieces::new(),
            };
            ledger.post_sends(1, [read].into_iter(), || (1, false));
            ledger.polled(&Completion {
                number: 17,
                wr_id: 3,
                is_receive: false,
                status: 7,
                cause: Cause::BadResponse.number().into(),
                send: Some(1),
            });
            assert_eq!(ledger.reporter.findings, expected);
        }
    }

    /// The report of a request that failed for this cause. Its address handle has the address 3.
    fn report(cause: Cause) -> String {
        report_of(cause, |ledger| {
            let work = Work {
                name: "SEND",
                wr_id: 3,
                is_signaled: true,
                is_inline: false,
                elements: Elements::Read,
                is_fenced: false,
                ah: 3,
                pieces: Pieces::from_iter([Piece { addr: 4096, len: 64, lkey: 5 }]),
            };
            ledger.post_sends(1, [work].into_iter(), || (1, false));
            let cause = cause.number().into();
            ledger.polled(&Completion {
                number: 17,
                wr_id: 3,
                is_receive: false,
                status: 2,
                cause,
                send: Some(1),
            });
        })
    }

    #[test]
    fn a_failure_names_the_missing_right_and_the_address_handle() {
        let text = report(Cause::LkeyRight);
        assert!(text.contains("lacks LOCAL_WRITE, and its rights are: REMOTE_READ"), "{text}");
        let text = report(Cause::AhOfOtherPd);
        assert!(text.contains("The address handle was made here"), "{text}");
    }

    #[test]
    fn the_owner_of_a_region_is_told_its_rights() {
        let refusal = |key| {
            report_of(Cause::RkeyRight, |ledger| {
                let (cause, first) = (Cause::RkeyRight.number(), "a WRITE was refused".into());
                let reason = Dropped::Message { cause, key, first };
                let drops = DroppedDatagrams { reason, count: 1, from: String::new() };
                ledger.dropped(1, &drops);
                ledger.dropped(1, &drops);
            })
        };
        let text = refusal(6);
        let what = "queue pair 0x000011 has refused its peer: a WRITE was refused; the region at 0x1000 (64 bytes) has the rights: REMOTE_READ";
        assert!(text.lines().count() == 1 && text.contains(what), "{text}");
        assert!(text.contains("The region was registered here"), "{text}");
        let drops = DroppedDatagrams {
            reason: Dropped::Message {
                cause: Cause::RkeyOfOtherPd.number(),
                key: 6,
                first: "a WRITE was refused".into(),
            },
            count: 1,
            from: String::new(),
        };
        let text = report_of(Cause::RkeyOfOtherPd, |ledger| ledger.dropped(1, &drops));
        assert!(text.contains(r#""check":"pd-mismatch""#), "{text}");
        let what = "has refused its peer: a WRITE was refused; the region at 0x1000 (64 bytes) belongs to the protection domain at 0x0";
        assert!(text.contains(what) && text.contains("The region was registered here"), "{text}");
        // That of a region that has ended.
        let text = refusal(7);
        assert!(text.contains("a WRITE was refused\"") && !text.contains("registered"), "{text}");
    }
}
