//! Record layer of TLS 1.3 (RFC 8446, section 5) with AES-GCM.
//!
//! rustls performs the handshake and derives the keys; see [`rustls::kernel`]. Records are sealed
//! and opened here, where their bytes are: a whole record's without a copy. rustls moves every byte
//! of a record through three buffers of its own, which costs as much as the encryption.

use std::io::IoSlice;
use std::ops::Range;

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use rustls::{ConnectionTrafficSecrets, ContentType, Error};

/// Most plain bytes in a record (section 5.1).
pub(super) const MOST_PLAIN_BYTES: usize = 1 << 14;
pub(super) const HEADER_BYTES: usize = 5;
/// Most bytes after the header (section 5.2).
const MOST_BODY_BYTES: usize = MOST_PLAIN_BYTES + 256;
const TAG_BYTES: usize = 16;
/// Most bytes of a record, header included.
pub(super) const MOST_RECORD_BYTES: usize = HEADER_BYTES + MOST_BODY_BYTES;
/// Number of records after which a key is replaced; AES-GCM permits five times as many (section
/// 5.5).
const RECORDS_A_KEY: u64 = 1 << 22;

/// Key of one direction, and the number of the next record.
struct Cipher {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    next_record: u64,
}

impl Cipher {
    fn new((next_record, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Cipher, Error> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            _ => return Err(Error::General("its cipher is not AES-GCM".to_owned())),
        };
        let invalid = || Error::General("its key has an invalid length".to_owned());
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| invalid())?;
        let iv = iv.as_ref().try_into().map_err(|_| invalid())?;
        Ok(Cipher { key: LessSafeKey::new(key), iv, next_record })
    }

    /// Returns the nonce of the next record (section 5.3). No two records have the same: each call
    /// takes a number of its own, and they do not wrap.
    fn nonce(&mut self) -> Result<Nonce, Error> {
        let mut nonce = self.iv;
        let number = self.next_record.to_be_bytes();
        nonce[NONCE_LEN - number.len()..].iter_mut().zip(number).for_each(|(to, of)| *to ^= of);
        self.next_record = self.next_record.checked_add(1).ok_or(Error::EncryptError)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// Seals the records of one direction.
pub(super) struct Sealer(Cipher);

impl Sealer {
    /// Creates a sealer from the number of its first record and its key.
    pub(super) fn new(secrets: (u64, ConnectionTrafficSecrets)) -> Result<Sealer, Error> {
        Cipher::new(secrets).map(Sealer)
    }

    /// Returns whether the key has sealed so many records that it must be replaced.
    pub(super) fn is_worn(&self) -> bool {
        self.0.next_record >= RECORDS_A_KEY
    }

    /// Appends a record with at most [`MOST_PLAIN_BYTES`] plain bytes to `sealed`.
    pub(super) fn seal(
        &mut self,
        kind: ContentType,
        plain: &[u8],
        sealed: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let header = header(plain.len() + 1 + TAG_BYTES)?;
        sealed.extend_from_slice(&header);
        let start = sealed.len();
        sealed.extend_from_slice(plain);
        sealed.push(u8::from(kind));
        let tag = self.seal_in_place(header, &mut sealed[start..])?;
        sealed.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Encrypts plain bytes and their content type where they are.
    fn seal_in_place(
        &mut self,
        header: [u8; HEADER_BYTES],
        inner: &mut [u8],
    ) -> Result<Tag, Error> {
        let nonce = self.0.nonce()?;
        let sealed = self.0.key.seal_in_place_separate_tag(nonce, Aad::from(header), inner);
        sealed.map_err(|_| Error::EncryptError)
    }
}

/// Records whose plain bytes were sealed where they are, except those of a record that nothing
/// follows, and what is sent around them.
#[derive(Debug, Default)]
pub(super) struct Sealed {
    /// Headers, content types and tags of all records, in the order of sending. At the start there
    /// may be whole records, and at the end one.
    around: Vec<u8>,
    /// Each record's place in the plain bytes, and the end of what is sent before it.
    places: Vec<(usize, Range<usize>)>,
}

impl Sealed {
    pub(super) fn clear(&mut self) {
        self.around.clear();
        self.places.clear();
    }

    /// Adds a whole record, before all others.
    pub(super) fn begin_with(
        &mut self,
        sealer: &mut Sealer,
        kind: ContentType,
        plain: &[u8],
    ) -> Result<(), Error> {
        sealer.seal(kind, plain, &mut self.around)
    }

    /// Seals the first `count` bytes of `plain` in records of application data.
    ///
    /// A record's content type follows its plain bytes and is encrypted with them. For that moment
    /// it takes the place of the next byte of `plain`. A record that nothing follows is copied
    /// instead.
    pub(super) fn seal(
        &mut self,
        sealer: &mut Sealer,
        plain: &mut [u8],
        count: usize,
    ) -> Result<(), Error> {
        let kind = ContentType::ApplicationData;
        let mut start = 0;
        while start < count {
            let end = count.min(start + MOST_PLAIN_BYTES);
            if end == plain.len() {
                return sealer.seal(kind, &plain[start..], &mut self.around);
            }
            let header = header(end - start + 1 + TAG_BYTES)?;
            self.around.extend_from_slice(&header);
            self.places.push((self.around.len(), start..end));
            let next = std::mem::replace(&mut plain[end], u8::from(kind));
            let tag = sealer.seal_in_place(header, &mut plain[start..=end])?;
            self.around.push(std::mem::replace(&mut plain[end], next));
            self.around.extend_from_slice(tag.as_ref());
            start = end;
        }
        Ok(())
    }

    /// Returns the records, in parts. `plain` is what was sealed.
    pub(super) fn parts<'a>(&'a self, plain: &'a [u8]) -> Vec<IoSlice<'a>> {
        let (mut parts, mut at) = (Vec::with_capacity(2 * self.places.len() + 1), 0);
        for (before, record) in &self.places {
            parts.push(IoSlice::new(&self.around[at..*before]));
            parts.push(IoSlice::new(&plain[record.clone()]));
            at = *before;
        }
        parts.push(IoSlice::new(&self.around[at..]));
        parts
    }
}

/// Opens the records of one direction.
pub(super) struct Opener(Cipher);

/// Record that was opened.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Opened<'a> {
    pub(super) kind: ContentType,
    pub(super) plain: &'a [u8],
}

impl Opener {
    /// Creates an opener from the number of its first record and its key.
    pub(super) fn new(secrets: (u64, ConnectionTrafficSecrets)) -> Result<Opener, Error> {
        Cipher::new(secrets).map(Opener)
    }

    /// Opens a whole record in place.
    ///
    /// # Errors
    /// [`Error::DecryptError`] if it was not sealed with the peer's key as the next record.
    pub(super) fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<Opened<'a>, Error> {
        let (header, body) =
            record.split_first_chunk_mut::<HEADER_BYTES>().ok_or(Error::DecryptError)?;
        self.open_body(*header, body, 0)
    }

    /// Opens the record that begins at `at` and ends with `bytes`, as [`Opener::open`] does. Its
    /// plain bytes begin at the start of `bytes` afterwards.
    pub(super) fn open_to_start<'a>(
        &mut self,
        bytes: &'a mut [u8],
        at: usize,
    ) -> Result<Opened<'a>, Error> {
        let record = bytes.get(at..).unwrap_or_default();
        let header = *record.first_chunk::<HEADER_BYTES>().ok_or(Error::DecryptError)?;
        self.open_body(header, bytes, at + HEADER_BYTES)
    }

    /// Opens a record whose body begins at `body_at`.
    fn open_body<'a>(
        &mut self,
        header: [u8; HEADER_BYTES],
        bytes: &'a mut [u8],
        body_at: usize,
    ) -> Result<Opened<'a>, Error> {
        let nonce = self.0.nonce()?;
        let opened = self.0.key.open_within(nonce, Aad::from(header), bytes, body_at..);
        let inner = opened.map_err(|_| Error::DecryptError)?;
        // Zeros after the content type are padding.
        let kind_at = inner
            .iter()
            .rposition(|byte| *byte != 0)
            .ok_or_else(|| Error::General("the peer sent a record without a type".to_owned()))?;
        if kind_at > MOST_PLAIN_BYTES {
            return Err(Error::PeerSentOversizedRecord);
        }
        let (plain, kind) = inner.split_at(kind_at);
        Ok(Opened { kind: ContentType::from(kind[0]), plain })
    }
}

fn header(body_bytes: usize) -> Result<[u8; HEADER_BYTES], Error> {
    let body = u16::try_from(body_bytes).ok().filter(|_| body_bytes <= MOST_BODY_BYTES);
    let [high, low] = body.ok_or(Error::EncryptError)?.to_be_bytes();
    Ok([u8::from(ContentType::ApplicationData), 3, 3, high, low])
}

/// Returns the length of the record with which `bytes` begin, header included; `None` if too few
/// bytes are there to know it.
///
/// # Errors
/// The bytes begin with no encrypted record, or with one that is longer than permitted.
pub(super) fn record_bytes(bytes: &[u8]) -> Result<Option<usize>, Error> {
    let Some([kind, _, _, high, low]) = bytes.first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    if ContentType::from(*kind) != ContentType::ApplicationData {
        return Err(Error::InappropriateMessage {
            expect_types: vec![ContentType::ApplicationData],
            got_type: ContentType::from(*kind),
        });
    }
    let body = usize::from(u16::from_be_bytes([*high, *low]));
    if body > MOST_BODY_BYTES {
        return Err(Error::PeerSentOversizedRecord);
    }
    Ok(Some(HEADER_BYTES + body))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    fn secrets(first_record: u64) -> (u64, ConnectionTrafficSecrets) {
        let (key, iv) = (AeadKey::from([7; 32]), Iv::from([9; NONCE_LEN]));
        (first_record, ConnectionTrafficSecrets::Aes256Gcm { key, iv })
    }

    /// Returns the record of `plain`, padded with zeros.
    fn sealed(plain: &[u8], padding: usize) -> Vec<u8> {
        let mut padded = plain.to_vec();
        padded.push(u8::from(ContentType::ApplicationData));
        padded.extend(std::iter::repeat_n(0, padding));
        let mut record = Vec::new();
        // The sealer appends its own content type: 0 is padding.
        Sealer::new(secrets(0)).unwrap().seal(ContentType::from(0), &padded, &mut record).unwrap();
        record
    }

    proptest! {
        #[test]
        fn what_was_sealed_is_opened_in_order(
            plains in vec(vec(any::<u8>(), 0..3000), 1..6),
            first in prop_oneof![Just(0), Just(RECORDS_A_KEY), any::<u32>().prop_map(u64::from)],
        ) {
            let mut sealer = Sealer::new(secrets(first)).unwrap();
            let mut opener = Opener::new(secrets(first)).unwrap();
            let mut records = Vec::new();
            for plain in &plains {
                sealer.seal(ContentType::ApplicationData, plain, &mut records).unwrap();
            }
            for plain in &plains {
                let length = record_bytes(&records).unwrap().unwrap();
                let mut record: Vec<u8> = records.drain(..length).collect();
                let opened = opener.open(&mut record).unwrap();
                prop_assert_eq!(opened.plain, &plain[..]);
                prop_assert_eq!(opened.kind, ContentType::ApplicationData);
            }
            prop_assert!(records.is_empty());
        }

        #[test]
        fn bytes_are_sealed_where_they_are_and_opened_one_behind_the_other(
            length in prop_oneof![1_usize..100, 16_380_usize..16_390, 32_700_usize..50_000],
            with_another in any::<bool>(),
            in_between in 0_usize..50_000,
            seed in any::<u8>(),
        ) {
            let pattern = (0..=250_u8).cycle().map(|byte| byte ^ seed);
            let plain: Vec<u8> = pattern.take(length).collect();
            let mut sealer = Sealer::new(secrets(0)).unwrap();
            let (mut sealed, mut place) = (Sealed::default(), plain.clone());
            if with_another {
                sealed.begin_with(&mut sealer, ContentType::Handshake, b"key").unwrap();
            }
            let mut bytes = Vec::new();
            let mut rest = &mut place[..];
            for count in [in_between.min(length), length - in_between.min(length)] {
                sealed.seal(&mut sealer, rest, count).unwrap();
                sealed.parts(rest).iter().for_each(|part| bytes.extend_from_slice(part));
                sealed.clear();
                rest = &mut rest[count..];
            }
            let mut opener = Opener::new(secrets(0)).unwrap();
            let (mut opened, mut at) = (0, 0);
            while at < bytes.len() {
                let end = at + record_bytes(&bytes[at..]).unwrap().unwrap();
                let record = opener.open_to_start(&mut bytes[opened..end], at - opened).unwrap();
                if record.kind == ContentType::ApplicationData {
                    opened += record.plain.len();
                } else {
                    prop_assert_eq!(record.plain, b"key");
                }
                at = end;
            }
            prop_assert_eq!(&bytes[..opened], &plain[..]);
        }

        #[test]
        fn a_changed_record_is_refused(
            plain in vec(any::<u8>(), 0..200),
            place in any::<prop::sample::Index>(),
            bit in 0_u32..8,
        ) {
            let mut record = sealed(&plain, 0);
            record[place.index(plain.len() + 22)] ^= 1_u8 << bit;
            prop_assert_eq!(
                Opener::new(secrets(0)).unwrap().open(&mut record),
                Err(Error::DecryptError)
            );
        }

        #[test]
        fn any_bytes_are_refused_without_harm(mut bytes in vec(any::<u8>(), 0..64)) {
            if let Ok(Some(length)) = record_bytes(&bytes) {
                prop_assert!(length <= HEADER_BYTES + MOST_BODY_BYTES);
            }
            prop_assert!(Opener::new(secrets(0)).unwrap().open(&mut bytes).is_err());
        }
    }

    #[test]
    fn padding_is_left_out_and_its_length_is_limited() {
        for padding in [0, 1, 255] {
            let mut record = sealed(b"page", padding);
            let mut opener = Opener::new(secrets(0)).unwrap();
            assert_eq!(opener.open(&mut record).unwrap().plain, b"page");
        }
        let mut nothing_but_padding = Vec::new();
        let mut sealer = Sealer::new(secrets(0)).unwrap();
        sealer.seal(ContentType::from(0), &[0; 9], &mut nothing_but_padding).unwrap();
        assert!(Opener::new(secrets(0)).unwrap().open(&mut nothing_but_padding).is_err());
        let mut too_long = sealed(&[1; MOST_PLAIN_BYTES + 1], 0);
        assert_eq!(
            Opener::new(secrets(0)).unwrap().open(&mut too_long),
            Err(Error::PeerSentOversizedRecord)
        );
    }

    #[test]
    fn a_record_has_one_place_in_the_order() {
        let record = sealed(b"page", 0);
        let mut opener = Opener::new(secrets(0)).unwrap();
        assert!(opener.open(&mut record.clone()).is_ok());
        assert_eq!(opener.open(&mut record.clone()), Err(Error::DecryptError));
    }

    #[test]
    fn a_header_says_what_follows() {
        assert_eq!(record_bytes(&[23, 3, 3, 1]), Ok(None));
        assert_eq!(record_bytes(&[23, 3, 3, 1, 0]), Ok(Some(HEADER_BYTES + 256)));
        assert_eq!(record_bytes(&[23, 3, 3, 0x41, 1]), Err(Error::PeerSentOversizedRecord));
        // Once the handshake is over, nothing is sent in the clear.
        assert!(record_bytes(&[22, 3, 3, 0, 1]).is_err());
    }
}
