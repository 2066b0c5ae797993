//! Taking an input apart.

/// The rest of an input; zeros when it is used up.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// The next bytes, as many as there are.
    pub fn rest(&mut self, most: usize) -> Vec<u8> {
        let (these, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        these.to_vec()
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// True one time in eight.
    pub fn rarely(&mut self) -> bool {
        self.byte() & 7 == 7
    }

    /// A length: mostly around the MTU.
    pub fn len(&mut self, mtu: usize) -> usize {
        let n = usize::from(self.word());
        match n & 3 {
            0 => n % 9,
            1 => mtu * (1 + n / 4 % 3),
            2 => (mtu * (n / 4 % 4) + n / 16 % 5).saturating_sub(2),
            _ => n / 4 % 6000,
        }
    }

    /// Chooses one of these.
    pub fn one_of<T: Copy>(&mut self, these: &[T]) -> T {
        these[usize::from(self.byte()) % these.len()]
    }
}
