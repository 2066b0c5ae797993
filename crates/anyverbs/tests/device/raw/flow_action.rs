//! Flow actions that several rules share.

use super::*;

fn esp(direction: Direction) -> EspAttr {
    EspAttr {
        direction,
        offload: Offload::Full(FullOffload { spi: 7, replay_window: 32, ..FullOffload::default() }),
        keymat: AesGcm { key: (0..16).collect(), salt: [1; 4], iv: 1, icv_len: 16 },
        esn: None,
    }
}

/// Rules that take the very same frames get a copy each, whichever action they have: an action takes a packet once.
#[test]
fn twins_of_two_actions_get_a_copy_each() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let action =
        |port: &Port, direction| port.context.create_flow_action_esp(esp(direction)).unwrap();
    let encrypts = action(&a, Direction::Encrypt);
    let egress = FlowAttr { egress: true, ..rule(&[to_port(9)]) };
    let _egress = a.qp.create_flow(egress, None, Some(&encrypts)).unwrap();
    let twins = [0; 5].map(|_| Port::new());
    let actions = [action(&a, Direction::Decrypt), action(&a, Direction::Decrypt)];
    let of_port = [0, 1, 1, 0, 1];
    let _rules = std::array::from_fn::<_, 5, _>(|i| {
        let filter = Filter::Esp { spi: Masked { val: 7, mask: u32::MAX }, seq: Masked::default() };
        twins[i].qp.create_flow(rule(&[filter]), None, Some(&actions[of_port[i]])).unwrap()
    });
    let frame = udp(BOB, [10, 0, 0, 1], 9, b"for all of them");
    for round in 0..3 {
        twins.iter().for_each(|twin| twin.recv(round, 0, 2048));
        a.send(&frame);
        for (i, twin) in twins.iter().enumerate() {
            let wc = twin.poll(1)[0];
            assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, frame.len() as u32), "{i}");
        }
    }
    assert_eq!(actions[0].destroy(), Err(DestroyError::Busy("2 flow rule".into())));
}
