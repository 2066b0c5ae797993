//! The checks, and their pages.

use std::fmt;

macro_rules! checks {
    ($($name:ident $id:literal;)+) => {
        /// A mistake that is looked for.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Check {
            $(
                #[doc = concat!("See `docs/checks/", $id, ".md`.")]
                $name,
            )+
        }

        impl Check {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The name that reports and suppressions use.
            #[must_use]
            pub fn id(self) -> &'static str {
                match self {
                    $(Self::$name => $id,)+
                }
            }

            /// Its page of the book.
            #[must_use]
            pub fn page(self) -> &'static str {
                match self {
                    $(Self::$name => include_str!(concat!("../pages/", $id, ".md")),)+
                }
            }
        }
    };
}

checks! {
    QpDestroyed "qp-destroyed-with-work";
    MrDeregistered "mr-deregistered-with-work";
    AhDestroyed "ah-destroyed-with-work";
    BufferChanged "buffer-changed";
    UdReceiveRoom "ud-receive-without-grh";
    InlineTooLong "inline-too-long";
    SendQueueUnsignaled "send-queue-unsignaled";
    EndedInUse "ended-in-use";
    Unacknowledged "unacknowledged-event";
    CqTooSmall "cq-too-small";
    CqOverrun "cq-overrun";
    CqThreads "cq-polled-by-two-threads";
    WrongKey "lkey-used-as-rkey";
    Rights "rights-too-weak";
    PdMismatch "pd-mismatch";
    ReceiveTooSmall "receive-too-small";
    NoReceive "receive-not-posted";
    NoFence "read-without-fence";
    Memlock "memory-beyond-memlock";
    LastWqe "srq-last-wqe";
    UseAfterDestroy "use-after-destroy";
    ForkedChild "posted-from-forked-child";
    FailedWcOpcode "failed-wc-opcode";
    QkeyMismatch "qkey-mismatch";
    PkeyMismatch "pkey-mismatch";
    EndsDiffer "ends-differ";
    DatagramUnreceived "datagram-without-receive";
    DatagramTooLong "datagram-too-long";
    OutOfOrder "extended-calls-out-of-order";
    Persona "refused-by-persona";
    Leak "leak";
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl Check {
    /// The mistake in a few words: the heading of its page, without the name.
    #[must_use]
    pub fn title(self) -> &'static str {
        let heading = self.page().lines().next().unwrap_or_default();
        heading.split_once(": ").map_or(heading, |(_, title)| title)
    }

    /// The text below a heading of its page, in one line.
    pub(crate) fn section(self, heading: &str) -> String {
        let lines = self.page().lines().skip_while(|line| *line != format!("## {heading}")).skip(1);
        let text: Vec<_> = lines
            .skip_while(|line| line.is_empty())
            .take_while(|line| !line.is_empty() && !line.starts_with('#'))
            .collect();
        text.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::report::{REMEDY, WHY};

    #[test]
    fn each_check_has_a_page_and_each_page_a_check() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
        for check in Check::ALL {
            assert!(check.page().starts_with(&format!("# {check}: ")), "{check}");
            for heading in [WHY, REMEDY] {
                assert!(!check.section(heading).is_empty(), "{check} {heading}");
            }
            assert!(summary.contains(&format!("[{check}](checks/{check}.md)")), "{check}");
        }
        let pages = fs::read_dir(docs.join("checks")).unwrap();
        let names = pages.map(|page| page.unwrap().file_name().into_string().unwrap());
        let known = |name: &String| {
            name == "index.md" || Check::ALL.iter().any(|check| *name == format!("{check}.md"))
        };
        assert_eq!(names.filter(|name| !known(name)).collect::<Vec<_>>(), [""; 0]);
    }
}
