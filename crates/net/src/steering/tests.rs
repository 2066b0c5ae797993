use super::probe::{Answer, SlotProbe};
use super::program::{self, Rules, SteerByKind};

#[test]
fn probes_and_answers_survive_and_garbage_does_not() {
    for steer_offset in [0, 5, 40] {
        let probe = SlotProbe { index: 200, cookie: 0x0123_4567_89ab_cdef };
        let bytes = probe.datagram(0xff, steer_offset);
        assert!(bytes.len() > steer_offset);
        assert_eq!(SlotProbe::parse(0xff, &bytes), Some(probe));
        assert_eq!(SlotProbe::parse(0xfe, &bytes), None);
        assert_eq!(SlotProbe::parse(0xff, &bytes[..13]), None);
        for at in 2..6 {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(SlotProbe::parse(0xff, &bad), None);
        }
    }
    let answer = Answer { index: 3, slot: 255, cookie: 42 };
    assert_eq!(Answer::parse(&answer.datagram()), Some(answer));
    assert_eq!(Answer::parse(&Answer { slot: 0, ..answer }.datagram()), None);
    assert_eq!(Answer::parse(&[0; 14]), None);
    assert_eq!(Answer::parse(&[]), None);
}

/// Runs a program as the kernel would, for the instructions that the builder uses.
fn run(program: &[libc::sock_filter], data: &[u8]) -> u32 {
    let (mut a, mut pc) = (0, 0);
    loop {
        let i = program[pc];
        pc += 1;
        match u32::from(i.code) {
            c if c == libc::BPF_LD | libc::BPF_B | libc::BPF_ABS => match data.get(i.k as usize) {
                Some(&byte) => a = u32::from(byte),
                None => return 0,
            },
            c if c == libc::BPF_LD | libc::BPF_H | libc::BPF_ABS => {
                match data.get(i.k as usize..).and_then(|d| d.first_chunk()) {
                    Some(&bytes) => a = u16::from_be_bytes(bytes).into(),
                    None => return 0,
                }
            }
            c if c == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                match data.get(i.k as usize..).and_then(|d| d.first_chunk()) {
                    Some(&bytes) => a = u32::from_be_bytes(bytes),
                    None => return 0,
                }
            }
            c if c == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => a &= i.k,
            c if c == libc::BPF_JMP | libc::BPF_JA => pc += i.k as usize,
            c if c == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                pc += usize::from(if a == i.k { i.jt } else { i.jf })
            }
            c if c == libc::BPF_RET | libc::BPF_K => return i.k,
            c if c == libc::BPF_RET | libc::BPF_A => return a,
            c => panic!("unexpected instruction {c:#x}"),
        }
    }
}

fn rules(by_kind: Option<SteerByKind>) -> Rules {
    Rules { probe_byte: 0xff, steer_offset: 5, by_kind }
}

const KINDS: SteerByKind = SteerByKind {
    offset: 4,
    mask: 0xff_ffff,
    value: 1,
    kind_offset: 8,
    slot_offsets: &[(0x10, 10), (0x11, 11), (0x1234, 12)],
};

#[test]
fn datagrams_with_their_own_rule_are_mapped_by_kind() {
    let mut map = [None; 256];
    map[7] = Some(3);
    map[8] = Some(4);
    let program = program::build(&rules(Some(KINDS)), &map);
    let slots = [7, 8, 9];
    let of = |kind: u16| {
        let mut data = vec![0, 0, 0, 0, 0xee, 0, 0, 1];
        data.extend_from_slice(&kind.to_be_bytes());
        data.extend_from_slice(&slots);
        data
    };
    assert_eq!(run(&program, &of(0x10)), 3);
    assert_eq!(run(&program, &of(0x11)), 4);
    assert_eq!(run(&program, &of(0x1234)), u32::MAX, "nobody has the slot");
    assert_eq!(run(&program, &of(0x0010 << 8)), u32::MAX, "another kind");
    assert_eq!(run(&program, &of(0x10)[..8]), 0, "too short");
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 7, 0, 1]), 3, "not of this rule");
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 9, 0, 1]), u32::MAX);
    assert_eq!(run(&program, &[0xff, 77, 0, 0, 0, 0, 0, 1]), 77, "a probe");
    assert!(KINDS.covers(&of(0x10)) && !KINDS.covers(&of(0x10)[..7]));
}

#[test]
fn the_program_maps_slots_to_indices_and_probes_to_theirs() {
    let mut map = [None; 256];
    map[7] = Some(0);
    map[255] = Some(1);
    map[1] = Some(200);
    let program = program::build(&rules(None), &map);
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 7]), 0);
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 255]), 1);
    assert_eq!(run(&program, &[0, 9, 9, 9, 9, 1]), 200);
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 8]), u32::MAX);
    assert_eq!(run(&program, &[0xff, 77, 0, 0, 0, 7]), 77);
    let full = program::build(&rules(Some(KINDS)), &[Some(3); 256]);
    assert!(full.len() < 4096);
}
