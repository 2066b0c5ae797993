//! The messages of the CM, one file each or for each pair (IBA chapter 12).

pub mod code;
pub mod disconnect;
pub mod ece;
mod field;
pub mod lap;
pub mod mra;
pub mod path;
pub mod private_data;
pub mod rej;
pub mod rep;
pub mod req;
pub mod rtu;
pub mod sidr;

use std::fmt;

pub use field::{BODY_LEN, Body};

use disconnect::{Drep, Dreq};
use lap::{Apr, Lap};
use mra::Mra;
use rej::Rej;
use rep::Rep;
use req::Req;
use rtu::Rtu;
use sidr::{SidrRep, SidrReq};

macro_rules! attributes {
    ($($variant:ident($ty:ty) = $id:literal, $name:literal;)*) => {
        /// Attribute of a MAD: which message it is.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u16)]
        pub enum Attribute { $(#[doc = concat!("`", $name, "`.")] $variant = $id,)* }

        impl Attribute {
            /// All, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// From the number on the wire.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($id => Some(Self::$variant),)* _ => None }
            }

            /// Name of its file in the kernel's `cm_*_msgs` directories.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }

        /// Any message.
        #[derive(Clone, PartialEq, Eq, Debug)]
        #[expect(missing_docs, reason = "the variants are the messages")]
        pub enum Message { $($variant($ty),)* }

        impl Message {
            /// Reads the message of this attribute. Any bytes are one.
            #[must_use]
            pub fn parse(attribute: Attribute, body: &Body) -> Self {
                match attribute { $(Attribute::$variant => Self::$variant(<$ty>::parse(body)),)* }
            }

            /// Writes the message.
            pub fn emit(&self, body: &mut Body) {
                match self { $(Self::$variant(message) => message.emit(body),)* }
            }

            /// The kind of the message.
            #[must_use]
            pub const fn attribute(&self) -> Attribute {
                match self { $(Self::$variant(_) => Attribute::$variant,)* }
            }
        }

        impl fmt::Display for Message {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self { $(Self::$variant(message) => message.fmt(f),)* }
            }
        }

        $(impl From<$ty> for Message {
            fn from(message: $ty) -> Self {
                Self::$variant(message)
            }
        })*

        #[cfg(test)]
        fn all_places() -> Vec<(&'static str, Vec<(usize, usize, &'static str)>)> {
            vec![$(($name, <$ty>::places()),)*]
        }
    };
}

attributes! {
    Req(Req) = 0x10, "req";
    Mra(Mra) = 0x11, "mra";
    Rej(Rej) = 0x12, "rej";
    Rep(Rep) = 0x13, "rep";
    Rtu(Rtu) = 0x14, "rtu";
    Dreq(Dreq) = 0x15, "dreq";
    Drep(Drep) = 0x16, "drep";
    SidrReq(SidrReq) = 0x17, "sidr_req";
    SidrRep(SidrRep) = 0x18, "sidr_rep";
    Lap(Lap) = 0x19, "lap";
    Apr(Apr) = 0x1a, "apr";
}

#[cfg(test)]
mod tests;
