//! Words of a page, and what is made of them.

use crate::Unreadable;

/// Bytes of a text, at most.
const MAX_TEXT: usize = 256;

/// A value in a row.
pub(crate) trait Part: Sized {
    /// Words that it takes.
    const WORDS: usize;

    fn put(&self, to: &mut Writer<'_>);

    /// None if the words are no such value.
    fn take(from: &mut Reader<'_>) -> Option<Self>;
}

macro_rules! numbers {
    ($($number:ty)+) => {$(
        impl Part for $number {
            const WORDS: usize = 1;

            fn put(&self, to: &mut Writer<'_>) {
                to.word((*self).into());
            }

            fn take(from: &mut Reader<'_>) -> Option<Self> {
                Self::try_from(from.word()?).ok()
            }
        }
    )+};
}

numbers!(u8 u16 u32 u64);

impl Part for bool {
    const WORDS: usize = 1;

    fn put(&self, to: &mut Writer<'_>) {
        to.word((*self).into());
    }

    fn take(from: &mut Reader<'_>) -> Option<Self> {
        let word = from.word()?;
        (word <= 1).then_some(word == 1)
    }
}

impl Part for u128 {
    const WORDS: usize = 2;

    fn put(&self, to: &mut Writer<'_>) {
        to.word((*self >> 64) as u64);
        to.word(*self as u64);
    }

    fn take(from: &mut Reader<'_>) -> Option<Self> {
        Some(Self::from(from.word()?) << 64 | Self::from(from.word()?))
    }
}

/// A struct whose fields are [`Part`]s.
macro_rules! row {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl $crate::words::Part for $name {
            const WORDS: usize = 0 $(+ <$type as $crate::words::Part>::WORDS)*;

            fn put(&self, to: &mut $crate::words::Writer<'_>) {
                $($crate::words::Part::put(&self.$field, to);)*
            }

            fn take(from: &mut $crate::words::Reader<'_>) -> Option<Self> {
                Some(Self { $($field: $crate::words::Part::take(from)?,)* })
            }
        }
    )*};
}

pub(crate) use row;

/// Writes words.
pub(crate) struct Writer<'a>(&'a mut Vec<u8>);

impl<'a> Writer<'a> {
    pub(crate) fn new(page: &'a mut Vec<u8>) -> Self {
        Self(page)
    }

    pub(crate) fn word(&mut self, word: u64) {
        self.0.extend_from_slice(&word.to_ne_bytes());
    }

    pub(crate) fn rows<T: Part>(&mut self, rows: &[T]) {
        self.word(T::WORDS as u64);
        self.word(rows.len() as u64);
        for row in rows {
            row.put(self);
        }
    }

    /// A longer one is cut to its beginning.
    pub(crate) fn text(&mut self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min(MAX_TEXT)];
        self.word(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }

    pub(crate) fn texts<'t>(&mut self, texts: impl ExactSizeIterator<Item = (&'t str, u64)>) {
        self.word(texts.len() as u64);
        for (text, value) in texts {
            self.text(text);
            self.word(value);
        }
    }
}

/// Reads words that anybody may have written.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(page: &'a [u8]) -> Self {
        Self(page)
    }

    pub(crate) fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*word))
    }

    fn skip(&mut self, words: usize) -> Option<()> {
        self.0 = self.0.get(words.checked_mul(8)?..)?;
        Some(())
    }

    /// The number of things that are to follow, each of so many words.
    pub(crate) fn count(&mut self, words: usize) -> Option<usize> {
        let count = usize::try_from(self.word()?).ok()?;
        (count.checked_mul(words)? <= self.0.len() / 8).then_some(count)
    }

    pub(crate) fn rows<T: Part>(&mut self) -> Option<Vec<T>> {
        let words = usize::try_from(self.word()?).ok()?;
        let further = words.checked_sub(T::WORDS)?;
        let row = |from: &mut Self| {
            let row = T::take(from)?;
            from.skip(further)?;
            Some(row)
        };
        (0..self.count(words)?).map(|_| row(self)).collect()
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        let len = usize::try_from(self.word()?).ok().filter(|len| *len <= MAX_TEXT)?;
        let bytes = self.0.get(..len)?;
        self.skip(len.div_ceil(8))?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    pub(crate) fn texts(&mut self) -> Option<impl Iterator<Item = (String, u64)> + use<>> {
        // A text has a word for its length at least.
        let count = self.count(2)?;
        let all: Option<Vec<_>> = (0..count).map(|_| Some((self.text()?, self.word()?))).collect();
        Some(all?.into_iter())
    }
}

pub(crate) trait Malformed<T> {
    fn or_malformed(self) -> Result<T, Unreadable>;
}

impl<T> Malformed<T> for Option<T> {
    fn or_malformed(self) -> Result<T, Unreadable> {
        self.ok_or(Unreadable::Malformed)
    }
}
