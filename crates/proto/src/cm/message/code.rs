//! Codes in messages, each as its own type.

use std::fmt;

use super::field::{Value, number, read, write};

macro_rules! codes {
    (
        $(#[$doc:meta])*
        $name:ident($ty:ty, $bits:literal) {
            $($(#[$variant_doc:meta])* $variant:ident = $code:literal, $text:literal;)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
            /// A code that was not defined when this was written.
            Other($ty),
        }

        impl $name {
            /// All that are defined.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// From the number on the wire.
            #[must_use]
            pub const fn from_code(code: $ty) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            /// The number on the wire.
            #[must_use]
            pub const fn code(self) -> $ty {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::Other(code) => write!(f, "code {code}"),
                }
            }
        }

        number! { $name: $bits, |n| $name::from_code(n as $ty), |c: $name| u64::from(c.code()); }
    };
}

codes! {
    /// The reason for a rejection (IBA table 108).
    RejReason(u16, 16) {
        /// The responder has no queue pair to give.
        NoQp = 1, "no queue pair available";
        /// The responder has no EE context to give.
        NoEec = 2, "no EE context available";
        /// The responder lacks resources.
        NoResources = 3, "no resources available";
        /// The sender waited too long.
        Timeout = 4, "timeout";
        /// The request is not supported.
        UnsupportedRequest = 5, "unsupported request";
        /// The recipient knows no such connection.
        InvalidCommId = 6, "invalid communication ID";
        /// The IDs are known, but not together.
        InvalidCommInstance = 7, "invalid communication instance";
        /// No listener answers for the service.
        InvalidServiceId = 8, "invalid service ID";
        /// The listener does not serve this transport.
        InvalidTransport = 9, "invalid transport service type";
        /// The recipient believed to be connected to the sender's queue pair.
        StaleConn = 10, "stale connection";
        /// There is no such RDC.
        NoRdc = 11, "RDC does not exist";
        /// The primary path's GID.
        InvalidGid = 12, "primary remote port GID rejected";
        /// The primary path's LID.
        InvalidLid = 13, "primary remote port LID rejected";
        /// The primary path's SL.
        InvalidSl = 14, "invalid primary SL";
        /// The primary path's traffic class.
        InvalidTrafficClass = 15, "invalid primary traffic class";
        /// The primary path's hop limit.
        InvalidHopLimit = 16, "invalid primary hop limit";
        /// The primary path's rate.
        InvalidPacketRate = 17, "invalid primary packet rate";
        /// The alternate path's GID.
        InvalidAltGid = 18, "alternate remote port GID rejected";
        /// The alternate path's LID.
        InvalidAltLid = 19, "alternate remote port LID rejected";
        /// The alternate path's SL.
        InvalidAltSl = 20, "invalid alternate SL";
        /// The alternate path's traffic class.
        InvalidAltTrafficClass = 21, "invalid alternate traffic class";
        /// The alternate path's hop limit.
        InvalidAltHopLimit = 22, "invalid alternate hop limit";
        /// The alternate path's rate.
        InvalidAltPacketRate = 23, "invalid alternate packet rate";
        /// Ask another port and CM.
        PortCmRedirect = 24, "port and CM redirection";
        /// Ask another port.
        PortRedirect = 25, "port redirection";
        /// The path MTU.
        InvalidMtu = 26, "invalid path MTU";
        /// Fewer responder resources than asked for.
        InsufficientResources = 27, "insufficient responder resources";
        /// The program said no.
        Consumer = 28, "consumer reject";
        /// The RNR retry count.
        InvalidRnrRetry = 29, "RNR retry count reject";
        /// The sender's communication ID is already in use.
        DuplicateCommId = 30, "duplicate local communication ID";
        /// The CM class version; the version that would do is in the additional information.
        InvalidClassVersion = 31, "invalid class version";
        /// The primary path's flow label.
        InvalidFlowLabel = 32, "invalid flow label";
        /// The alternate path's flow label.
        InvalidAltFlowLabel = 33, "invalid alternate flow label";
        /// The vendor's options (ECE).
        VendorOption = 35, "vendor option is not supported";
    }
}

codes! {
    /// The message that is rejected, or answered late (IBA 12.7.33).
    About(u8, 2) {
        /// The REQ.
        Req = 0, "REQ";
        /// The REP.
        Rep = 1, "REP";
        /// Another message; in an MRA, the LAP.
        No = 2, "no message";
    }
}

codes! {
    /// Transport service type of a REQ (IBA 12.7.6).
    ServiceType(u8, 2) {
        /// Reliable connection.
        Rc = 0, "RC";
        /// Unreliable connection.
        Uc = 1, "UC";
        /// Reliable datagram.
        Rd = 2, "RD";
        /// See the extended transport type.
        Extended = 3, "extended";
    }
}

codes! {
    /// Answer to a LAP (IBA 12.8.5).
    ApStatus(u8, 8) {
        /// The path is loaded.
        Loaded = 0, "loaded";
        /// The recipient knows no such connection.
        InvalidCommId = 1, "invalid communication ID";
        /// The recipient has no alternate paths.
        Unsupported = 2, "alternate paths are not supported";
        /// The program said no.
        Rejected = 3, "rejected";
        /// Ask elsewhere.
        Redirect = 4, "redirect";
        /// The path is loaded already.
        IsCurrent = 5, "is the current path";
        /// The queue pair is not that of the connection.
        InvalidQpn = 6, "invalid QPN";
    }
}

codes! {
    /// Answer to a SIDR_REQ (IBA 12.11.2.2).
    SidrStatus(u8, 8) {
        /// The queue pair follows.
        Valid = 0, "valid";
        /// No listener answers for the service.
        UnsupportedService = 1, "service ID is not supported";
        /// The program said no.
        Rejected = 2, "rejected";
        /// There is no queue pair to give.
        NoQp = 3, "no queue pair available";
        /// Ask elsewhere.
        Redirect = 4, "redirect";
        /// The class version.
        UnsupportedVersion = 5, "version is not supported";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_what_they_were() {
        for code in 0..=u16::MAX {
            assert_eq!(RejReason::from_code(code).code(), code);
        }
        for code in 0..=u8::MAX {
            assert_eq!(SidrStatus::from_code(code).code(), code);
            assert_eq!(ApStatus::from_code(code).code(), code);
        }
        assert_eq!(RejReason::ALL.len(), 34);
        assert_eq!(RejReason::from_code(10), RejReason::StaleConn);
        assert_eq!(RejReason::from_code(34), RejReason::Other(34));
        assert_eq!(RejReason::Other(34).to_string(), "code 34");
    }
}
