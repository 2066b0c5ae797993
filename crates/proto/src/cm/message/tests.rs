use super::code::RejReason;
use super::ece::{RepVendorId, SidrRepVendorId};
use super::path::PathRecord;
use super::*;
use crate::cm::id::CommId;
use crate::types::{Gid, Mtu, Qpn};

/// Bytes with a pattern in which every field differs.
fn patterned(seed: u8) -> Body {
    std::array::from_fn(|i| (i as u8).wrapping_mul(37).wrapping_add(seed))
}

#[test]
fn fields_lie_apart_and_inside() {
    for (name, mut places) in all_places() {
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{name}: {} and {}", pair[0].2, pair[1].2);
        }
        let last = places.last().unwrap();
        assert_eq!(last.0 + last.1, BODY_LEN * 8, "{name}: the private data ends the message");
    }
}

#[test]
fn any_bytes_are_a_message_that_stays_the_same() {
    for attribute in Attribute::ALL {
        for seed in 0..=255 {
            let message = Message::parse(*attribute, &patterned(seed));
            assert_eq!(message.attribute(), *attribute);
            let mut body = [0xaa; BODY_LEN];
            message.emit(&mut body);
            assert_eq!(Message::parse(*attribute, &body), message);
            assert!(!message.to_string().contains('\n'));
        }
    }
}

#[test]
fn attributes_are_numbered_as_in_the_spec() {
    let numbers: Vec<_> = (0..=0xffff).filter_map(Attribute::from_code).collect();
    assert_eq!(numbers, Attribute::ALL);
    assert_eq!(Attribute::Req as u16, 0x10);
    assert_eq!(Attribute::Apr as u16, 0x1a);
}

/// Each field alone in the place that IBA chapter 12 gives it.
#[test]
fn req_has_its_fields_where_they_belong() {
    let mut body = [0; BODY_LEN];
    let mut req = Req::parse(&body);
    req.local_comm_id = CommId(0x0102_0304);
    req.vendor_id = 0x0a_0b0c;
    req.local_qpn = Qpn::new(0x11_2233);
    req.responder_resources = 0x44;
    req.remote_response_timeout = 0x15;
    req.service_type = code::ServiceType::Extended;
    req.retry_count = 7;
    req.path_mtu = Some(Mtu::Mtu4096);
    req.rnr_retry_count = 6;
    req.max_cm_retries = 15;
    req.srq = true;
    req.extended_transport = Req::XRC;
    req.primary = PathRecord {
        local_gid: Gid([0x55; 16]),
        flow_label: 0xf_0003,
        packet_rate: 0x3f,
        hop_limit: 0x40,
        ack_timeout: 0x11,
        ..PathRecord::default()
    };
    req.emit(&mut body);
    assert_eq!(body[..8], [1, 2, 3, 4, 0, 0x0a, 0x0b, 0x0c]);
    assert_eq!(body[32..36], [0x11, 0x22, 0x33, 0x44]);
    assert_eq!(body[43], 0x15 << 3 | 3 << 1);
    assert_eq!(body[47], 7);
    assert_eq!(body[50..52], [0x56, 0xf9]);
    assert_eq!(body[56..72], [0x55; 16]);
    assert_eq!(body[88..96], [0xf0, 0x00, 0x30, 0x3f, 0, 0x40, 0, 0x88]);
}

#[test]
fn vendor_ids_are_scattered() {
    let mut body = [0; BODY_LEN];
    Rep { vendor_id: RepVendorId(0x12_3456), ..Rep::default() }.emit(&mut body);
    assert_eq!((body[15], body[19], body[23]), (0x12, 0x34, 0x56));
    SidrRep { vendor_id: SidrRepVendorId(0x12_3456), ..SidrRep::default() }.emit(&mut body);
    assert_eq!((body[6], body[7], body[11]), (0x12, 0x34, 0x56));
}

#[test]
fn reject_information_is_cut_to_its_room() {
    let rej = Rej { reason: RejReason::StaleConn, ..Rej::default() };
    assert_eq!(rej.clone().with_info(&[7; 100]).info(), [7; 72]);
    assert_eq!(rej.clone().with_info(&[7; 3]).info(), [7; 3]);
    assert_eq!(Rej { info_len: 127, ..rej }.info().len(), 72, "a length that lies");
}
