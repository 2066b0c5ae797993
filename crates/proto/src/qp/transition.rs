//! The legal modifies: transitions, attributes and values (IBA 10.3.1, 11.2.5.2, `ibv_modify_qp(3)`).

use super::attr::{ModifyError, ModifyLimits, QpAttr, QpAttrMask, QpState, QpType};
use QpState::{Err as Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
use QpType::{Rc, Uc, Ud, XrcRecv, XrcSend};

/// One transition of some types: the attributes that it requires and those that it also allows. STATE goes without
/// saying.
struct Row {
    types: &'static [QpType],
    from: &'static [QpState],
    to: QpState,
    required: QpAttrMask,
    optional: QpAttrMask,
}

const fn row(
    types: &'static [QpType],
    from: &'static [QpState],
    to: QpState,
    required: QpAttrMask,
    optional: QpAttrMask,
) -> Row {
    Row { types, from, to, required, optional }
}

macro_rules! bits {
    ($($bit:ident)*) => { QpAttrMask::empty()$(.union(QpAttrMask::$bit))* };
}

const ALL: &[QpType] = &[Rc, Uc, Ud, XrcSend, XrcRecv];
const ANY: &[QpState] = &[Reset, Init, Rtr, Rts, Sqd, Sqe, Error];

/// Every legal transition, once. All others are illegal. CAP is in none: resizing is for devices that announce it.
#[rustfmt::skip] // a line each for required and optional
const TABLE: &[Row] = &[
    row(ALL, ANY, Reset, bits!(), bits!()),
    row(ALL, ANY, Error, bits!(), bits!()),

    row(&[Rc, Uc, XrcSend, XrcRecv], &[Reset], Init,
        bits!(PKEY_INDEX PORT ACCESS_FLAGS),
        bits!()),
    row(&[Ud], &[Reset], Init,
        bits!(PKEY_INDEX PORT QKEY),
        bits!()),

    row(&[Rc, Uc, XrcSend, XrcRecv], &[Init], Init,
        bits!(),
        bits!(PKEY_INDEX PORT ACCESS_FLAGS)),
    row(&[Ud], &[Init], Init,
        bits!(),
        bits!(PKEY_INDEX PORT QKEY)),

    row(&[Rc, XrcRecv], &[Init], Rtr,
        bits!(AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER),
        bits!(ALT_PATH ACCESS_FLAGS PKEY_INDEX)),
    row(&[Uc, XrcSend], &[Init], Rtr,
        bits!(AV PATH_MTU DEST_QPN RQ_PSN),
        bits!(ALT_PATH ACCESS_FLAGS PKEY_INDEX)),
    row(&[Ud], &[Init], Rtr,
        bits!(),
        bits!(PKEY_INDEX QKEY)),

    row(&[Rc], &[Rtr], Rts,
        bits!(TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE RATE_LIMIT)),
    row(&[XrcSend], &[Rtr], Rts,
        bits!(TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT)),
    row(&[XrcRecv], &[Rtr], Rts,
        bits!(TIMEOUT SQ_PSN),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE)),
    row(&[Uc], &[Rtr], Rts,
        bits!(SQ_PSN),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT)),
    row(&[Ud], &[Rtr], Rts,
        bits!(SQ_PSN),
        bits!(CUR_STATE QKEY RATE_LIMIT)),

    row(&[Rc], &[Rts], Rts,
        bits!(),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE RATE_LIMIT)),
    row(&[XrcSend], &[Rts], Rts,
        bits!(),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT)),
    row(&[XrcRecv], &[Rts], Rts,
        bits!(),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE)),
    row(&[Uc], &[Rts], Rts,
        bits!(),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE RATE_LIMIT)),
    row(&[Ud], &[Rts], Rts,
        bits!(),
        bits!(CUR_STATE QKEY RATE_LIMIT)),

    row(ALL, &[Rts], Sqd,
        bits!(),
        bits!(EN_SQD_ASYNC_NOTIFY)),

    row(&[Rc, XrcRecv], &[Sqd], Rts,
        bits!(),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE)),
    row(&[Uc, XrcSend], &[Sqd], Rts,
        bits!(),
        bits!(CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE)),
    row(&[Ud], &[Sqd], Rts,
        bits!(),
        bits!(CUR_STATE QKEY)),

    row(&[Rc], &[Sqd], Sqd,
        bits!(),
        bits!(PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC ALT_PATH
            ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE)),
    row(&[XrcSend], &[Sqd], Sqd,
        bits!(),
        bits!(PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX
            PATH_MIG_STATE)),
    row(&[XrcRecv], &[Sqd], Sqd,
        bits!(),
        bits!(PORT AV TIMEOUT MAX_DEST_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER
            PATH_MIG_STATE)),
    row(&[Uc], &[Sqd], Sqd,
        bits!(),
        bits!(AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE)),
    row(&[Ud], &[Sqd], Sqd,
        bits!(),
        bits!(PKEY_INDEX QKEY)),

    // A reliable queue pair never gets to SQE: its send errors are errors of the whole.
    row(&[Uc], &[Sqe], Rts,
        bits!(),
        bits!(CUR_STATE ACCESS_FLAGS)),
    row(&[Ud], &[Sqe], Rts,
        bits!(),
        bits!(CUR_STATE QKEY)),
];

/// Legal in places, but this device has no alternate paths.
const UNSUPPORTED: QpAttrMask = bits!(ALT_PATH PATH_MIG_STATE);

/// Checks a modify against the table of IBA 10.3.1 / 11.2.5.2: transition, required and optional attributes,
/// values. Returns the state to go to; without STATE in the mask, the queue pair stays where it is.
///
/// `known` has the present attributes.
///
/// Faults are reported in this order, each time with all the attributes concerned: CUR_STATE (the program's other
/// choices follow from it), transition, missing, extra, unsupported, values.
pub(crate) fn check(
    qp_type: QpType,
    current: QpState,
    attr: &QpAttr,
    mask: QpAttrMask,
    limits: &ModifyLimits,
    known: &QpAttr,
) -> Result<QpState, ModifyError> {
    if mask.contains(QpAttrMask::CUR_STATE) && attr.cur_state != current {
        return Err(ModifyError::CurState(current));
    }
    let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { current };
    let row = TABLE
        .iter()
        .find(|r| r.to == to && r.from.contains(&current) && r.types.contains(&qp_type))
        .ok_or(ModifyError::Transition { from: current, to })?;
    refuse(row.required.difference(mask), ModifyError::Missing)?;
    // `difference`, not `& !`: the operator would let unknown bits through.
    let extra = mask.difference(QpAttrMask::STATE | row.required | row.optional);
    refuse(extra, ModifyError::Extra)?;
    refuse(mask.intersection(UNSUPPORTED), ModifyError::Unsupported)?;
    refuse(bad_values(attr, mask, limits, known), ModifyError::Value)?;
    Ok(to)
}

fn refuse(
    bits: QpAttrMask,
    error: impl FnOnce(QpAttrMask) -> ModifyError,
) -> Result<(), ModifyError> {
    if bits.is_empty() { Ok(()) } else { Err(error(bits)) }
}

/// The attributes of the mask whose values are out of range.
fn bad_values(
    attr: &QpAttr,
    mask: QpAttrMask,
    limits: &ModifyLimits,
    known: &QpAttr,
) -> QpAttrMask {
    let is_port = |port| (1..=limits.ports).contains(&port);
    // A path leaves by the queue pair's own port: the one that it has, or gets now.
    let port = if mask.contains(QpAttrMask::PORT) { attr.port } else { known.port };
    let dgid = attr.av.dgid;
    // Only connected types take a path, and their peer is one port.
    let is_path =
        is_port(attr.av.port) && attr.av.port == port && !dgid.is_zero() && !dgid.is_multicast();
    // One that it has already stays on its port.
    let has_path = !known.av.dgid.is_zero() && !mask.contains(QpAttrMask::AV);
    let may_move = !has_path || attr.port == known.av.port;
    [
        (QpAttrMask::PORT, is_port(attr.port) && may_move),
        (QpAttrMask::PKEY_INDEX, usize::from(attr.pkey_index) < limits.pkeys.len()),
        (QpAttrMask::AV, is_path),
        (QpAttrMask::PATH_MTU, attr.path_mtu <= limits.max_mtu),
        (QpAttrMask::RATE_LIMIT, attr.rate_limit <= limits.max_rate_limit),
        (QpAttrMask::TIMEOUT, attr.timeout <= 31),
        (QpAttrMask::RETRY_CNT, attr.retry_cnt <= 7),
        (QpAttrMask::RNR_RETRY, attr.rnr_retry <= 7),
        (QpAttrMask::MIN_RNR_TIMER, attr.min_rnr_timer <= 31),
        (QpAttrMask::MAX_QP_RD_ATOMIC, attr.max_rd_atomic <= limits.max_rd_atomic),
        (QpAttrMask::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic <= limits.max_rd_atomic),
    ]
    .into_iter()
    .filter_map(|(bit, good)| (mask.contains(bit) && !good).then_some(bit))
    .collect()
}

#[cfg(test)]
mod tests;
