use super::probe::{Answer, Probe};
use super::program;

#[test]
fn probes_and_answers_survive_and_garbage_does_not() {
    for steer_offset in [0, 5, 40] {
        let probe = Probe { index: 200, cookie: 0x0123_4567_89ab_cdef };
        let bytes = probe.datagram(0xff, steer_offset);
        assert!(bytes.len() > steer_offset);
        assert_eq!(Probe::parse(0xff, &bytes), Some(probe));
        assert_eq!(Probe::parse(0xfe, &bytes), None);
        assert_eq!(Probe::parse(0xff, &bytes[..13]), None);
        for at in 2..6 {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(Probe::parse(0xff, &bad), None);
        }
    }
    let answer = Answer { index: 3, slot: 255, cookie: 42 };
    assert_eq!(Answer::parse(&answer.datagram()), Some(answer));
    assert_eq!(Answer::parse(&Answer { slot: 0, ..answer }.datagram()), None);
    assert_eq!(Answer::parse(&[0; 14]), None);
    assert_eq!(Answer::parse(&[]), None);
}

/// Runs a program as the kernel would, over what the builder uses of the instruction set.
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
            c if c == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                pc += usize::from(if a == i.k { i.jt } else { i.jf })
            }
            c if c == libc::BPF_RET | libc::BPF_K => return i.k,
            c if c == libc::BPF_RET | libc::BPF_A => return a,
            c => panic!("unexpected instruction {c:#x}"),
        }
    }
}

#[test]
fn the_program_maps_slots_to_indices_and_probes_to_what_they_ask() {
    let mut map = [None; 256];
    map[7] = Some(0);
    map[255] = Some(1);
    map[1] = Some(200);
    let program = program::build(0xff, 5, &map);
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 7]), 0);
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 255]), 1);
    assert_eq!(run(&program, &[0, 9, 9, 9, 9, 1]), 200);
    assert_eq!(run(&program, &[0, 0, 0, 0, 0, 8]), u32::MAX);
    assert_eq!(run(&program, &[0xff, 77, 0, 0, 0, 7]), 77);
    let full = program::build(0xff, 5, &[Some(3); 256]);
    assert!(full.len() < 4096);
}
