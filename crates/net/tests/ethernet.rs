//! Frames between processes, as far as the kernel can tell, and over an interface.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use std::time::{Duration, Instant};

use anyverbs_net::ethernet::{EthernetSocket, FrameBatch, FrameBuffers, MAX_FRAME};

/// Frames that arrive within a while, at most `wanted`.
fn received(socket: &EthernetSocket, wanted: usize) -> Vec<Vec<u8>> {
    let mut buffers = FrameBuffers::default();
    let mut frames = Vec::new();
    let deadline = Instant::now() + Duration::from_millis(if wanted == 0 { 50 } else { 5000 });
    while Instant::now() < deadline && (wanted == 0 || frames.len() < wanted) {
        socket.receive(&mut buffers).unwrap();
        frames.extend(buffers.frames().map(|f| f.bytes.to_vec()));
    }
    frames
}

fn batch(frames: &[&[u8]]) -> FrameBatch {
    let mut batch = FrameBatch::default();
    frames.iter().for_each(|frame| batch.push(frame));
    batch
}

#[test]
fn processes_of_one_segment_hear_each_other_and_not_themselves() {
    if !netns::isolate_as_root() {
        return;
    }
    let open = |segment| {
        let socket = EthernetSocket::between_processes(segment).unwrap();
        socket.listen().unwrap();
        socket
    };
    let (a, b, other) = (open("one"), open("one"), open("two"));
    let deaf = EthernetSocket::between_processes("one").unwrap();
    let long = vec![7; MAX_FRAME];
    let many: Vec<Vec<u8>> = (0..40u8).map(|i| vec![i; 60 + usize::from(i)]).collect();
    assert_eq!(a.send(&batch(&[b"a frame of sorts", &long])), 0);
    assert_eq!(a.send(&batch(&many.iter().map(|f| &f[..]).collect::<Vec<_>>())), 0);
    let got = received(&b, 42);
    assert_eq!(got[0], b"a frame of sorts");
    assert_eq!(got[1], long);
    assert_eq!(got[2..], many);
    for silent in [&a, &other, &deaf] {
        assert_eq!(received(silent, 0), Vec::<Vec<u8>>::new());
    }
}

#[test]
fn frames_cross_an_interface_with_their_tags() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("link add va type veth peer name vb");
    netns::plug_in(["va", "vb"]);
    let a = EthernetSocket::on_interface("va").unwrap();
    let b = EthernetSocket::on_interface("vb").unwrap();
    b.listen().unwrap();
    let plain = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb6][..], &[1; 50]].concat();
    let tagged =
        [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x81, 0, 0x60, 5, 0x88, 0xb6][..], &[2; 50]]
            .concat();
    let too_long = vec![0; 2000];
    assert_eq!(a.send(&batch(&[&plain, &too_long, &tagged])), 1);
    let experimental = |frames: Vec<Vec<u8>>| -> Vec<Vec<u8>> {
        // The kernels of both ends announce themselves as well.
        frames.into_iter().filter(|f| f.windows(2).any(|w| w == [0x88, 0xb6])).collect()
    };
    let mut got = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    while got.len() < 2 && Instant::now() < deadline {
        got.extend(experimental(received(&b, 1)));
    }
    assert_eq!(got, [plain, tagged]);
    assert_eq!(EthernetSocket::on_interface("vc").unwrap_err().raw_os_error(), Some(libc::ENODEV));
}

#[test]
fn frames_without_room_are_counted() {
    if !netns::isolate_as_root() {
        return;
    }
    let open = || EthernetSocket::between_processes("full").unwrap();
    let (a, b) = (open(), open());
    b.listen().unwrap();
    let long = vec![7; MAX_FRAME];
    let frames = batch(&[&long[..]; 32]);
    assert_eq!(b.dropped(), 0);
    let mut sent = 0;
    while b.dropped() == 0 {
        assert_eq!(a.send(&frames), 0);
        sent += 32;
        assert!(sent < 1_000_000, "the buffer has no end");
    }
    // The kernel may deliver the last ones later than it says that they are sent.
    let deadline = Instant::now() + Duration::from_secs(20);
    let (mut arrived, mut buffers) = (0, FrameBuffers::default());
    while arrived + b.dropped() < sent && Instant::now() < deadline {
        b.receive(&mut buffers).unwrap();
        arrived += buffers.frames().count() as u64;
    }
    assert!(arrived > 0);
    assert_eq!(arrived + b.dropped(), sent);
}

#[test]
fn a_full_interface_is_waited_for_briefly() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("link add va type veth peer name vb");
    netns::plug_in(["va", "vb"]);
    if !netns::choke("va") {
        return;
    }
    let a = EthernetSocket::on_interface("va").unwrap();
    let frames = batch(&[&[7; 1500][..]; 32]);
    let mut sent = 0;
    let waited = loop {
        let begin = Instant::now();
        if a.send(&frames) > 0 {
            break begin.elapsed();
        }
        sent += 32;
        assert!(sent < 1_000_000, "the queue has no end");
    };
    assert!((Duration::from_millis(20)..Duration::from_secs(5)).contains(&waited), "{waited:?}");
}
