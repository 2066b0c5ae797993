//! Why RDMA work fails: a stable code for each cause, and the pages that explain them.
//!
//! The pages are those of the book ("Troubleshooting"). A cause stands in the page of the status or error number that a
//! program sees. Its code is `AV` and four digits, of which the first two are that status.
#![forbid(unsafe_code)]

mod pages;

use std::fmt;

pub use pages::{all, error_number, find, name_of_error};

macro_rules! causes {
    ($($number:literal $name:ident $text:literal,)+) => {
        /// A cause of a failure.
        ///
        /// Numbers are stable: programs see them in `vendor_err` of a work completion, and peers in a refusal.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u16)]
        #[non_exhaustive]
        pub enum Cause {
            $(#[doc = $text] $name = $number,)+
        }

        impl Cause {
            /// All causes, by number.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The cause of this number.
            #[must_use]
            pub fn from_number(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)+
                    _ => None,
                }
            }

            /// The cause in one plain sentence, without its full stop: the heading of its page.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

causes! {
    101 MessageTooLong "the message is longer than the receive buffer",
    102 DatagramTooLong "the datagram is longer than the MTU",
    103 FixedLength "the operation has a fixed length",
    104 FrameLength "a raw packet has a length that no frame has",
    201 NoSuchOperation "this type of queue pair does not have the operation",
    202 NoReadsGranted "the queue pair may have no READ or atomic outstanding",
    203 AhOfOtherPd "the address handle is of another protection domain",
    204 AhOfOtherPort "the address handle is of another port than the queue pair",
    205 NotSegments "the header of the segments is not Ethernet, IP and TCP, to its end",
    401 LkeyUnknown "the local key names no region",
    402 LkeyDeregistered "the region of the local key was deregistered",
    403 RkeyAsLkey "a remote key stands where a local key belongs",
    404 LkeyOfOtherPd "the region is of another protection domain",
    405 LkeyRange "the range is not within the region",
    406 LkeyRight "the region lacks a right that the operation needs",
    407 LocalMemoryGone "the memory is not mapped any more",
    408 LkeyZeroBased "the region is zero-based: its addresses count from 0",
    409 LocalMemoryProtected "the memory is mapped without the permission that the operation needs",
    501 MovedToError "the queue pair was moved to the error state",
    601 WindowNotBound "the window or the region does not allow the bind",
    602 KeyNotInvalidated "the key cannot be invalidated",
    701 BadResponse "the response does not fit the request",
    901 PeerMessageTooLong "the peer's receive buffer is too short",
    902 MtuDiffers "the path MTU differs between the two ends",
    903 QpRight "the peer's queue pair lacks a right",
    904 TooManyReads "more READs and atomics are outstanding than the peer takes",
    905 Unaligned "the address of an atomic is not a multiple of 8",
    906 BadPacket "the packet does not fit the message or its headers",
    907 InvalidRequest "the peer gave no further reason",
    1001 RkeyUnknown "the remote key names no region",
    1002 RkeyDeregistered "the region of the remote key was deregistered",
    1003 LkeyAsRkey "a local key stands where a remote key belongs",
    1004 RkeyOfOtherPd "the region is of another protection domain",
    1005 RkeyRange "the range is not within the region",
    1006 RkeyRight "the region lacks a right that the operation needs",
    1007 WindowOfOtherQp "the memory window is bound to another queue pair",
    1008 PeerMemoryGone "the peer's memory is not mapped any more",
    1009 NoXrcSrq "the XRC domain of the peer has no such SRQ",
    1010 RemoteAccess "the peer gave no further reason",
    1011 WindowUnbound "the memory window is not bound",
    1012 WindowRebound "the memory window was bound anew, and has another key",
    1013 WindowRange "the range is not within the memory window",
    1014 WindowRight "the memory window lacks a right that the operation needs",
    1015 RkeyZeroBased "the region or window is zero-based: its addresses count from 0",
    1016 PeerMemoryProtected "the peer's memory is mapped without the permission that the operation needs",
    1101 PeerReceiveUnwritable "the peer's receive buffer cannot be written",
    1102 RemoteOperation "the peer gave no further reason",
    1201 NeverAnswered "the peer has never answered",
    1202 NoRoute "no route leads to the peer",
    1203 NobodyOnPort "nobody holds UDP port 4791 at the peer's address",
    1204 PeerEnded "the peer's process has ended, or never was",
    1205 PeerHasNoQp "the peer has no queue pair of this number",
    1206 PeerNotReady "the peer's queue pair is not ready to receive",
    1207 PeerInError "the peer's queue pair is in the error state",
    1208 PsnDiffers "the packet sequence numbers of the two ends do not fit",
    1209 GidDiffers "the peer's queue pair is connected to another address",
    1210 QpnDiffers "the peer's queue pair is connected to another queue pair",
    1211 SilentNow "the peer has answered before, and is silent now",
    1213 TypeDiffers "the peer's queue pair is of another type",
    1214 PacketLost "the peer is there, and the network lost the same packet each time",
    1215 PkeyDiffers "the P_Keys of the two queue pairs do not match",
    1216 PeerStopped "the peer's process is stopped",
    1217 PeerKeptKey "the peer could not invalidate the key that a SEND names",
    1301 NoReceive "the peer's program posted no receive",
    6001 UcNoReceive "a message of UC found no receive",
    6002 UcGap "messages of UC were lost on the way",
    7001 CqOverrun "a completion queue has overrun",
    8001 NoTransition "the queue pair cannot go from its state to that state",
    8002 AttributesMissing "the modify lacks attributes",
    8003 AttributesExtra "the modify has attributes that the move does not take",
    8004 AttributeValue "an attribute has a value that is not allowed",
    8005 Limit "a value of the object to create exceeds a limit",
    8006 Unreachable "the local GID cannot reach the peer",
    8007 SendQueueFull "the send queue is full",
    8008 NotMapped "part of the range to register is not mapped",
    8009 InUse "the object is in use",
    8010 Unacknowledged "a destroy waits for an event that was not acknowledged",
    8011 Persona "the device's persona does not have it",
    8012 GidWithoutTraffic "the GID index carries no traffic here",
    8013 WorkRequest "a work request has a value that the queue does not take",
    8014 LocalWriteMissing "the access flags of a region lack local write access",
    9901 Injected "a script of faults asked for it",
}

impl Cause {
    /// The number of its code.
    #[must_use]
    pub fn number(self) -> u16 {
        self as u16
    }
}

/// Its code: `AV1204`.
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AV{:04}", self.number())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn each_cause_has_one_heading_and_each_heading_a_cause() {
        let headings: Vec<_> = all()
            .flat_map(str::lines)
            .filter_map(|line| line.strip_prefix("##"))
            .map(|line| line.trim_start_matches('#').trim().to_owned())
            .filter(|line| line.starts_with("AV"))
            .collect();
        let mut sorted = headings.clone();
        sorted.sort();
        let causes: Vec<_> =
            Cause::ALL.iter().map(|cause| format!("{cause}: {}", cause.text())).collect();
        assert_eq!(sorted, causes);
    }

    #[test]
    fn numbers_lead_back_to_their_causes() {
        for cause in Cause::ALL {
            assert_eq!(Cause::from_number(cause.number()), Some(*cause));
        }
        assert_eq!(Cause::from_number(0), None);
    }

    #[test]
    fn the_book_has_the_same_pages() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let mut in_book = BTreeSet::new();
        for page in fs::read_dir(docs.join("troubleshooting")).unwrap() {
            let path = page.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                in_book.insert(fs::read_to_string(path).unwrap());
            }
        }
        let here: BTreeSet<_> = all().map(str::to_owned).collect();
        assert!(here.is_subset(&in_book), "a page of this crate is not in the book");
        let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
        for page in all() {
            let title = page.lines().next().unwrap().trim_start_matches("# ");
            let title = title.split_once(':').map_or(title, |(names, _)| names);
            assert!(summary.contains(&format!("[{title}](troubleshooting/")), "{title}");
        }
    }
}
