use super::*;
use crate::types::{Gid, Mtu, PKey};

const LIMITS: ModifyLimits = ModifyLimits {
    ports: 2,
    pkeys: &[PKey::DEFAULT],
    max_mtu: Mtu::Mtu1024,
    max_rd_atomic: 16,
    max_rate_limit: 400_000_000,
};
const NOTHING: QpAttrMask = QpAttrMask::empty();

/// The legal transitions, by type, except those to RESET and ERR.
const LEGAL: [(QpType, &str); 5] = [
    (Rc, "Reset>Init Init>Init Init>Rtr Rtr>Rts Rts>Rts Rts>Sqd Sqd>Rts Sqd>Sqd"),
    (Uc, "Reset>Init Init>Init Init>Rtr Rtr>Rts Rts>Rts Rts>Sqd Sqd>Rts Sqd>Sqd Sqe>Rts"),
    (Ud, "Reset>Init Init>Init Init>Rtr Rtr>Rts Rts>Rts Rts>Sqd Sqd>Rts Sqd>Sqd Sqe>Rts"),
    (XrcSend, "Reset>Init Init>Init Init>Rtr Rtr>Rts Rts>Rts Rts>Sqd Sqd>Rts Sqd>Sqd"),
    (XrcRecv, "Reset>Init Init>Init Init>Rtr Rtr>Rts Rts>Rts Rts>Sqd Sqd>Rts Sqd>Sqd"),
];

/// The types whose path leads to one peer.
const CONNECTED: &[QpType] = &[Rc, Uc, XrcSend, XrcRecv];
const RELIABLE: &[QpType] = &[Rc, XrcSend, XrcRecv];
/// Those with a reliable requester, and those with a reliable responder.
const SENDS: &[QpType] = &[Rc, XrcSend];
const RECEIVES: &[QpType] = &[Rc, XrcRecv];

/// The same table, turned: an attribute, where it is required, where it is optional, and for which types.
#[rustfmt::skip]
const BY_ATTRIBUTE: &[(QpAttrMask, &[QpType], &str, &str)] = &[
    (QpAttrMask::CUR_STATE, RELIABLE, "", "Rtr>Rts Rts>Rts Sqd>Rts"),
    (QpAttrMask::CUR_STATE, &[Uc, Ud], "", "Rtr>Rts Rts>Rts Sqd>Rts Sqe>Rts"),
    (QpAttrMask::EN_SQD_ASYNC_NOTIFY, ALL, "", "Rts>Sqd"),
    (QpAttrMask::ACCESS_FLAGS, RELIABLE, "Reset>Init", "Init>Init Init>Rtr Rtr>Rts Rts>Rts Sqd>Rts Sqd>Sqd"),
    (QpAttrMask::ACCESS_FLAGS, &[Uc], "Reset>Init", "Init>Init Init>Rtr Rtr>Rts Rts>Rts Sqd>Rts Sqd>Sqd Sqe>Rts"),
    (QpAttrMask::PKEY_INDEX, ALL, "Reset>Init", "Init>Init Init>Rtr Sqd>Sqd"),
    (QpAttrMask::PORT, RELIABLE, "Reset>Init", "Init>Init Sqd>Sqd"),
    (QpAttrMask::PORT, &[Uc, Ud], "Reset>Init", "Init>Init"),
    (QpAttrMask::QKEY, &[Ud], "Reset>Init", "Init>Init Init>Rtr Rtr>Rts Rts>Rts Sqd>Rts Sqd>Sqd Sqe>Rts"),
    (QpAttrMask::AV, CONNECTED, "Init>Rtr", "Sqd>Sqd"),
    (QpAttrMask::PATH_MTU, CONNECTED, "Init>Rtr", ""),
    (QpAttrMask::DEST_QPN, CONNECTED, "Init>Rtr", ""),
    (QpAttrMask::RQ_PSN, CONNECTED, "Init>Rtr", ""),
    (QpAttrMask::MAX_DEST_RD_ATOMIC, RECEIVES, "Init>Rtr", "Sqd>Sqd"),
    (QpAttrMask::MIN_RNR_TIMER, RECEIVES, "Init>Rtr", "Rtr>Rts Rts>Rts Sqd>Rts Sqd>Sqd"),
    (QpAttrMask::TIMEOUT, RELIABLE, "Rtr>Rts", "Sqd>Sqd"),
    (QpAttrMask::RETRY_CNT, SENDS, "Rtr>Rts", "Sqd>Sqd"),
    (QpAttrMask::RNR_RETRY, SENDS, "Rtr>Rts", "Sqd>Sqd"),
    (QpAttrMask::MAX_QP_RD_ATOMIC, SENDS, "Rtr>Rts", "Sqd>Sqd"),
    (QpAttrMask::SQ_PSN, ALL, "Rtr>Rts", ""),
    (QpAttrMask::ALT_PATH, CONNECTED, "", "Init>Rtr Rtr>Rts Rts>Rts Sqd>Rts Sqd>Sqd"),
    (QpAttrMask::PATH_MIG_STATE, CONNECTED, "", "Rtr>Rts Rts>Rts Sqd>Rts Sqd>Sqd"),
    (QpAttrMask::RATE_LIMIT, &[Rc, Uc, Ud, XrcSend], "", "Rtr>Rts Rts>Rts"),
];

/// Attributes that the table allows and the device refuses.
const REFUSED: QpAttrMask = bits!(ALT_PATH PATH_MIG_STATE);

fn arrow(from: QpState, to: QpState) -> String {
    format!("{from:?}>{to:?}")
}

fn is_in(list: &str, arrow: &str) -> bool {
    list.split_whitespace().any(|a| a == arrow)
}

/// Required and optional attributes of a transition; `None` if it is not legal.
fn expected(qp_type: QpType, from: QpState, to: QpState) -> Option<(QpAttrMask, QpAttrMask)> {
    let arrow = arrow(from, to);
    let (_, legal) = LEGAL.iter().find(|(t, _)| *t == qp_type)?;
    if !is_in(legal, &arrow) {
        return matches!(to, Reset | Error).then_some((NOTHING, NOTHING));
    }
    let (mut required, mut optional) = (NOTHING, NOTHING);
    for (bit, types, where_required, where_optional) in BY_ATTRIBUTE {
        if types.contains(&qp_type) {
            required.set(*bit, required.contains(*bit) || is_in(where_required, &arrow));
            optional.set(*bit, optional.contains(*bit) || is_in(where_optional, &arrow));
        }
    }
    Some((required, optional))
}

fn every_pair() -> impl Iterator<Item = (QpType, QpState, QpState)> {
    let pairs = || ANY.iter().flat_map(|&from| ANY.iter().map(move |&to| (from, to)));
    ALL.iter().flat_map(move |&t| pairs().map(move |(from, to)| (t, from, to)))
}

fn every_bit() -> impl Iterator<Item = QpAttrMask> {
    (0..u32::BITS).map(|n| QpAttrMask::from_bits_retain(1 << n))
}

/// Values that are fine everywhere.
fn good(from: QpState, to: QpState) -> QpAttr {
    let mut attr = QpAttr { state: to, cur_state: from, port: 1, ..QpAttr::default() };
    attr.av.port = 1;
    attr.av.dgid = Gid::from("10.0.0.2".parse::<std::net::IpAddr>().unwrap());
    attr
}

fn known() -> QpAttr {
    QpAttr { port: 1, ..QpAttr::default() }
}

fn modify(
    qp_type: QpType,
    from: QpState,
    to: QpState,
    mask: QpAttrMask,
) -> Result<QpState, ModifyError> {
    check(qp_type, from, &good(from, to), mask, &LIMITS, &known())
}

#[test]
// S5.2
fn every_pair_with_every_bit_dropped_or_added() {
    let mut legal = 0;
    for (qp_type, from, to) in every_pair() {
        let context = format!("{qp_type:?} {from:?} {to:?}");
        let Some((required, optional)) = expected(qp_type, from, to) else {
            let error = Err(ModifyError::Transition { from, to });
            assert_eq!(modify(qp_type, from, to, QpAttrMask::STATE), error, "{context}");
            for bit in every_bit() {
                let mask = QpAttrMask::STATE | bit;
                assert_eq!(modify(qp_type, from, to, mask), error, "{context} {bit:?}");
            }
            continue;
        };
        legal += 1;
        let least = QpAttrMask::STATE | required;
        assert_eq!(modify(qp_type, from, to, least), Ok(to), "{context}");
        for bit in required {
            let error = Err(ModifyError::Missing(bit));
            assert_eq!(modify(qp_type, from, to, least - bit), error, "{context} {bit:?}");
        }
        for bit in every_bit().filter(|bit| !least.contains(*bit)) {
            let result = if !optional.contains(bit) {
                Err(ModifyError::Extra(bit))
            } else if REFUSED.contains(bit) {
                Err(ModifyError::Unsupported(bit))
            } else {
                Ok(to)
            };
            assert_eq!(modify(qp_type, from, to, least | bit), result, "{context} {bit:?}");
        }
        let most = least | optional.difference(REFUSED);
        assert_eq!(modify(qp_type, from, to, most), Ok(to), "{context}");
    }
    // 14 to RESET and ERR for each type, and those of LEGAL.
    assert_eq!(legal, 5 * 14 + 3 * 8 + 2 * 9);
}

#[test]
fn table_has_one_row_for_each_transition() {
    for (qp_type, from, to) in every_pair() {
        let rows = TABLE
            .iter()
            .filter(|r| r.to == to && r.from.contains(&from) && r.types.contains(&qp_type))
            .count();
        let context = format!("{qp_type:?} {from:?} {to:?}");
        assert_eq!(rows, usize::from(expected(qp_type, from, to).is_some()), "{context}");
    }
    for row in TABLE {
        assert!(row.required.intersection(row.optional | REFUSED).is_empty());
    }
}

#[test]
fn without_state_the_queue_pair_stays() {
    for &qp_type in ALL {
        for &current in ANY {
            // The state of the attributes is not in the mask, so it must not count.
            for &other in ANY {
                let stays = !matches!(current, Rtr | Sqe);
                let result = if stays {
                    Ok(current)
                } else {
                    Err(ModifyError::Transition { from: current, to: current })
                };
                assert_eq!(modify(qp_type, current, other, NOTHING), result);
            }
        }
    }
    let mask = QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    assert_eq!(modify(Rc, Init, Reset, mask), Ok(Init));
    assert_eq!(modify(Rc, Rts, Reset, mask), Err(ModifyError::Extra(QpAttrMask::PORT)));
}

#[test]
fn cur_state_must_be_the_present_state() {
    for (qp_type, from, to) in every_pair() {
        for &believed in ANY.iter().filter(|s| **s != from) {
            let attr = QpAttr { cur_state: believed, ..good(from, to) };
            let required = expected(qp_type, from, to).unwrap_or_default().0;
            let mask = QpAttrMask::STATE | required;
            let ask = |mask| check(qp_type, from, &attr, mask, &LIMITS, &known());
            assert_eq!(ask(mask | QpAttrMask::CUR_STATE), Err(ModifyError::CurState(from)));
            // Outside the mask its value does not matter.
            assert_eq!(ask(mask), modify(qp_type, from, to, mask));
        }
    }
}

#[test]
fn all_the_missing_and_extra_bits_are_named() {
    let required = bits!(PKEY_INDEX PORT ACCESS_FLAGS);
    assert_eq!(modify(Rc, Reset, Init, QpAttrMask::STATE), Err(ModifyError::Missing(required)));
    let unknown = QpAttrMask::from_bits_retain(1 << 21 | 1 << 31);
    let extra = unknown | bits!(CAP AV);
    let mask = QpAttrMask::STATE | required | extra;
    assert_eq!(modify(Rc, Reset, Init, mask), Err(ModifyError::Extra(extra)));
    assert_eq!(modify(Ud, Rts, Rts, unknown), Err(ModifyError::Extra(unknown)));
}

/// Tries a value in every transition of every type that takes the attribute.
fn assert_value(bit: QpAttrMask, fits: bool, set: impl Fn(&mut QpAttr)) {
    let mut tried = 0;
    for (qp_type, from, to) in every_pair() {
        let Some((required, optional)) = expected(qp_type, from, to) else { continue };
        let mut attr = good(from, to);
        set(&mut attr);
        let ask = |mask| check(qp_type, from, &attr, mask, &LIMITS, &known());
        let mask = QpAttrMask::STATE | required;
        if (required | optional).contains(bit) {
            tried += 1;
            let result = if fits { Ok(to) } else { Err(ModifyError::Value(bit)) };
            assert_eq!(ask(mask | bit), result, "{qp_type:?} {from:?} {to:?} {attr:?}");
        } else {
            assert_eq!(ask(mask), Ok(to), "a value outside the mask counted: {attr:?}");
        }
    }
    assert_ne!(tried, 0);
}

#[test]
fn values_have_ranges() {
    assert_value(QpAttrMask::PKEY_INDEX, true, |a| a.pkey_index = 0);
    assert_value(QpAttrMask::PKEY_INDEX, false, |a| a.pkey_index = 1);
    for (mtu, fits) in [(Mtu::Mtu256, true), (Mtu::Mtu1024, true), (Mtu::Mtu2048, false)] {
        assert_value(QpAttrMask::PATH_MTU, fits, |a| a.path_mtu = mtu);
    }
    for value in [0, 1, 2, 3, 7, 8, 16, 17, 31, 32, 128, 255] {
        assert_value(QpAttrMask::TIMEOUT, value <= 31, |a| a.timeout = value);
        assert_value(QpAttrMask::RETRY_CNT, value <= 7, |a| a.retry_cnt = value);
        assert_value(QpAttrMask::RNR_RETRY, value <= 7, |a| a.rnr_retry = value);
        assert_value(QpAttrMask::MIN_RNR_TIMER, value <= 31, |a| a.min_rnr_timer = value);
        assert_value(QpAttrMask::MAX_QP_RD_ATOMIC, value <= 16, |a| a.max_rd_atomic = value);
        let fits = value <= 16;
        assert_value(QpAttrMask::MAX_DEST_RD_ATOMIC, fits, |a| a.max_dest_rd_atomic = value);
        assert_value(QpAttrMask::PORT, (1..=2).contains(&value), |a| a.port = value);
        // The queue pair is on port 1.
        assert_value(QpAttrMask::AV, value == 1, |a| a.av.port = value);
    }
}

#[test]
fn a_path_leads_to_one_peer() {
    assert_value(QpAttrMask::AV, false, |a| a.av.dgid = Gid::ZERO);
    for group in ["224.0.0.7", "ff02::1"] {
        let group = Gid::from(group.parse::<std::net::IpAddr>().unwrap());
        assert_value(QpAttrMask::AV, false, |a| a.av.dgid = group);
    }
}

#[test]
fn a_path_may_follow_the_port_that_it_comes_with() {
    let mut attr = good(Sqd, Sqd);
    attr.av.port = 2;
    attr.port = 2;
    let ask = |attr: &QpAttr, mask| check(Rc, Sqd, attr, mask, &LIMITS, &known());
    assert_eq!(ask(&attr, bits!(PORT AV)), Ok(Sqd));
    assert_eq!(ask(&attr, bits!(AV)), Err(ModifyError::Value(QpAttrMask::AV)));
    let on_path = QpAttr { av: good(Sqd, Sqd).av, ..known() };
    let alone = |port| {
        let attr = QpAttr { port, ..attr };
        check(Rc, Sqd, &attr, bits!(PORT), &LIMITS, &on_path)
    };
    assert_eq!(alone(1), Ok(Sqd));
    assert_eq!(alone(2), Err(ModifyError::Value(QpAttrMask::PORT)), "its path stays on port 1");
    attr.port = 3;
    attr.av.port = 3;
    assert_eq!(ask(&attr, bits!(PORT AV)), Err(ModifyError::Value(bits!(PORT AV))));
}

#[test]
fn faults_are_reported_in_order() {
    let bad = QpAttr { timeout: 32, ..good(Rtr, Rts) };
    let ask = |mask| check(Rc, Rtr, &bad, mask, &LIMITS, &known());
    let mask = bits!(STATE TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC);
    let migration = bits!(ALT_PATH PATH_MIG_STATE);
    assert_eq!(ask(mask), Err(ModifyError::Value(QpAttrMask::TIMEOUT)));
    assert_eq!(ask(mask | migration), Err(ModifyError::Unsupported(migration)));
    let extra = mask | migration | QpAttrMask::PORT;
    assert_eq!(ask(extra), Err(ModifyError::Extra(QpAttrMask::PORT)));
    assert_eq!(ask(extra - QpAttrMask::SQ_PSN), Err(ModifyError::Missing(QpAttrMask::SQ_PSN)));
}
