//! The legal modifies of a RAW_PACKET queue pair (`ibv_modify_qp(3)`): it has a port, and no peer. Sends wait for nothing but a rate
//! limit, so there is no state in which to drain them (SQD).

use crate::qp::attr::{ModifyError, QpAttr, QpAttrMask, QpState};
use QpState::{Err as Error, Init, Reset, Rtr, Rts, Sqe};

/// The attributes that a transition requires, and those that it also allows. `None` if there is no such transition.
fn row(from: QpState, to: QpState) -> Option<(QpAttrMask, QpAttrMask)> {
    let none = QpAttrMask::empty();
    let rate = QpAttrMask::CUR_STATE | QpAttrMask::RATE_LIMIT;
    Some(match (from, to) {
        (_, Reset | Error) | (Init, Rtr) => (none, none),
        (Reset, Init) => (QpAttrMask::PORT, none),
        (Init, Init) => (none, QpAttrMask::PORT),
        (Rtr | Rts, Rts) => (none, rate),
        (Sqe, Rts) => (none, QpAttrMask::CUR_STATE),
        _ => return None,
    })
}

/// Checks a modify, and says where it leads; without STATE in the mask the queue pair stays where it is.
///
/// # Errors
/// Checks in the order of the other types: present state, transition, missing, extra, values.
pub fn check(
    current: QpState,
    attr: &QpAttr,
    mask: QpAttrMask,
    ports: u8,
    max_rate_limit: u32,
) -> Result<QpState, ModifyError> {
    if mask.contains(QpAttrMask::CUR_STATE) && attr.cur_state != current {
        return Err(ModifyError::CurState(current));
    }
    let none = QpAttrMask::empty();
    let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { current };
    let (required, optional) =
        row(current, to).ok_or(ModifyError::Transition { from: current, to })?;
    let refuse = |bits: QpAttrMask, error: fn(QpAttrMask) -> ModifyError| {
        if bits.is_empty() { Ok(()) } else { Err(error(bits)) }
    };
    refuse(required.difference(mask), ModifyError::Missing)?;
    let known = QpAttrMask::STATE | QpAttrMask::CUR_STATE | required | optional;
    refuse(mask.difference(known), ModifyError::Extra)?;
    let values = [
        (QpAttrMask::PORT, (1..=ports).contains(&attr.port)),
        (QpAttrMask::RATE_LIMIT, attr.rate_limit <= max_rate_limit),
    ];
    for (bit, is_right) in values {
        refuse(if is_right { none } else { mask & bit }, ModifyError::Value)?;
    }
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use QpState::Sqd;

    fn check(from: QpState, to: QpState, mask: QpAttrMask) -> Result<QpState, ModifyError> {
        let attr = QpAttr { state: to, cur_state: from, port: 1, ..QpAttr::default() };
        super::check(from, &attr, mask | QpAttrMask::STATE, 1, 1000)
    }

    #[test]
    fn up_with_a_port_alone() {
        let none = QpAttrMask::empty();
        assert_eq!(check(Reset, Init, QpAttrMask::PORT), Ok(Init));
        assert_eq!(check(Reset, Init, none), Err(ModifyError::Missing(QpAttrMask::PORT)));
        let key = QpAttrMask::PKEY_INDEX;
        assert_eq!(check(Reset, Init, QpAttrMask::PORT | key), Err(ModifyError::Extra(key)));
        assert_eq!(check(Init, Rtr, none), Ok(Rtr));
        assert_eq!(check(Rtr, Rts, none), Ok(Rts));
        assert_eq!(check(Sqe, Rts, QpAttrMask::CUR_STATE), Ok(Rts));
        let rate = QpAttrMask::RATE_LIMIT;
        assert_eq!(check(Rtr, Rts, rate), Ok(Rts));
        assert_eq!(check(Rts, Rts, rate), Ok(Rts));
        assert_eq!(check(Init, Rtr, rate), Err(ModifyError::Extra(rate)));
        for from in [Reset, Init, Rtr, Rts, Sqe, Error] {
            assert_eq!(check(from, Reset, none), Ok(Reset));
            assert_eq!(check(from, Error, none), Ok(Error));
        }
        for (from, to) in [(Reset, Rtr), (Init, Rts), (Error, Init), (Rtr, Init), (Rts, Sqd)] {
            assert_eq!(check(from, to, none), Err(ModifyError::Transition { from, to }));
        }
    }

    #[test]
    fn values_are_checked() {
        let attr = QpAttr { state: Init, port: 2, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PORT;
        assert_eq!(
            super::check(Reset, &attr, mask, 1, 0),
            Err(ModifyError::Value(QpAttrMask::PORT))
        );
        let mask = QpAttrMask::CUR_STATE | QpAttrMask::STATE;
        let attr = QpAttr { state: Rts, cur_state: Sqe, ..attr };
        assert_eq!(super::check(Rtr, &attr, mask, 1, 0), Err(ModifyError::CurState(Rtr)));
        let limit = |kbps| {
            let attr = QpAttr { rate_limit: kbps, ..QpAttr::default() };
            super::check(Rts, &attr, QpAttrMask::RATE_LIMIT, 1, 1000)
        };
        assert_eq!(limit(1000), Ok(Rts));
        assert_eq!(limit(1001), Err(ModifyError::Value(QpAttrMask::RATE_LIMIT)));
    }
}
